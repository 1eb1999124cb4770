"""Anthropic's API: bodies, events, answers and errors in the form that its clients expect."""
