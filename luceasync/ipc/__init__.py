"""Processes that work together: packets, payload memory, channels, launching, supervision.

Knows no model and imports neither torch nor numpy. `channel.py` has the protocols; the bodies here
are for one Linux machine: an inherited pair of sockets, and a sealed memory or a second socket.
"""
