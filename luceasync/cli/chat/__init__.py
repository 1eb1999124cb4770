"""The chat command: a conversation in a terminal, or through a pipe, one line per turn."""
