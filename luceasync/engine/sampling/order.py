"""A row's tokens in order, most probable first, as far as they are known.

Pure, on the host.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from luceasync.ranking.logits import WholeRow


class Order(NamedTuple):
    """A row's most probable tokens by logit: float64 and int64 `[ranked]`, of `num_all` that may
    come at all. Equal ones are in the order in which they were given.
    """

    values: np.ndarray
    ids: np.ndarray
    num_all: int


def certain(values: np.ndarray, ids: np.ndarray, num_vocab: int) -> Order:
    """What is known from a top-k selection, whose last value may have equals left outside."""
    if values[-1] == -np.inf:  # behind a mask: whatever may come is before it
        return _possible(values, ids)
    if len(values) < num_vocab:
        num_certain = (-values).searchsorted(-values[-1])
        values, ids = values[:num_certain], ids[:num_certain]
    return Order(values, ids.astype(np.int64), num_vocab)


def whole(row: WholeRow) -> Order:
    """All that may come."""
    return _possible(row.values, row.ids)


def _possible(values: np.ndarray, ids: np.ndarray) -> Order:
    """Of a ranking without an end that is not known, what may come."""
    num_all = int((-values).searchsorted(np.inf))
    return Order(values[:num_all], ids[:num_all].astype(np.int64), num_all)
