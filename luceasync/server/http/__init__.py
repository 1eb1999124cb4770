"""Connections, TLS, bodies, responses, and who may ask: HTTP/1.1 around the app."""
