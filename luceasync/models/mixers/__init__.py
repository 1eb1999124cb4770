"""Mixers: kinds of layers that mix tokens, one module each, with implementations for each kind of
device."""

from luceasync.models.mixers import delta, sliding

# Snapshot names of all end state, for files whose model is not available.
END_KINDS = frozenset((*delta.END_KINDS, *sliding.END_KINDS))
