"""Mixers: kinds of layers that mix tokens, a module each, with bodies for each kind of device."""

from luceasync.models.mixers import delta, sliding

# Snapshot names of all end state, for files whose model is not at hand.
END_KINDS = frozenset((*delta.END_KINDS, *sliding.END_KINDS))
