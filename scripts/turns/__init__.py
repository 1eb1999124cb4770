"""Conversations as agents hold them, and how much of each prompt a server finds again."""
