"""Kinds of layers that mix tokens, a file each; beside it what runs it, for each kind of device."""
