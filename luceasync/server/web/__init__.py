"""The web page and its static files."""
