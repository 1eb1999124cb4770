"""Real client programs, driven against this checkout's server with nothing else to reach."""
