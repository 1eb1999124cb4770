"""Connections: listeners, TLS, and HTTP/1.1 as hypercorn speaks it."""
