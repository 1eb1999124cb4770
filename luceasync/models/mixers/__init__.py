"""Kinds of layers that mix tokens, a file each; beside it what runs it, for each kind of device."""

from luceasync.models.mixers import delta

# What belongs to a node's end, of every kind that is known: for a file whose model is not at hand.
END_KINDS = frozenset(delta.END_KINDS)
