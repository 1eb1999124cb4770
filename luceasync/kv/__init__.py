"""Lanes: their pages, and the tensors in which their state lies."""
