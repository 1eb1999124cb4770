"""Processes that work together: packets, payload memory, channels, launching, supervision.

Does not know models, and imports neither torch nor numpy. `channel.py` has the protocols; the
implementations are for one Linux machine: an inherited pair of sockets, with sealed memory or a
second socket for payloads.
"""
