"""HTTP and nothing else: bodies in, events out. The engine is an argument; no torch here."""
