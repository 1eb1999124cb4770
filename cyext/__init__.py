"""Compiled loops over names and tokens, imported as luceasync.cyext; each file stands alone."""
