"""Requests on lanes: who runs next, one step at a time, in one thread. Knows no HTTP."""
