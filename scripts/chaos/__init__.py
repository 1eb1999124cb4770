"""Backends that die, hang and lie under a server, and who looks at what its clients are told."""
