"""The launch command: a coding agent, set up for a server here."""
