"""Kernels of a GPU compiled before they are launched, or words for a person.

Knows no pass. Imports the compiler only where something is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from luceasync.errors import LuceasyncError

PATIENCE_S = 300.0  # for one kernel more: the largest takes 12 s of one core


@contextmanager
def compiled_ahead(device: torch.device, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """See luceasync.kernels.kernel. Raises LuceasyncError where none is done within `patience_s`
    after the one before.
    """
    from luceasync.kernels import kernel

    try:
        with kernel.compiled_ahead(device, patience_s):
            yield
    except kernel.CompilerHangs as error:
        raise LuceasyncError(str(error)) from None
