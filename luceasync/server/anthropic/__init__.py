"""Anthropic's API: bodies, events, answers and errors, as its clients know them."""
