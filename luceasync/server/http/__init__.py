"""HTTP/1.1 around the app: connections, TLS, bodies, responses, API keys and origins."""
