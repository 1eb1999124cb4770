"""Nodes as files: what a file holds, where it lies, how it is written, read and looked after."""
