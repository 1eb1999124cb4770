"""Kinds of feed-forward networks, a file each."""
