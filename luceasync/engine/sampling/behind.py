"""What a row's token is behind a mask, as far as candidates tell that were ranked without it.

Pure, on the host. Knows no logits: where candidates do not decide, somebody asks for others.
"""

from __future__ import annotations

import math

import numpy as np

from luceasync.engine.sampling.filter_and_draw import (
    MARGIN,
    MOST_TEMPERATURE,
    draw_kept,
    kept_by_mass,
)
from luceasync.engine.sampling.order import Order
from luceasync.request import Sampling

_MOST_EXPONENT = 700.0  # float64 knows no larger power


def draw_behind(
    order: Order, total: float, sampling: Sampling, u: float, mask: np.ndarray
) -> int | None:
    """What `draw` gives of the tokens that `mask` lets through; None where that is not known.

    `order` and `total` are of the row as it came. The mass behind the mask is known but for what
    the tokens have that are not in `order`: the draw stands if it is the same with all of that
    and without any.
    """
    may_come = _lets_through(mask, order.ids)
    values, ids = order.values[may_come], order.ids[may_come]
    if not len(values) or sampling.temperature > MOST_TEMPERATURE:
        return None
    num_all = order.num_all
    num_unseen = 0
    if len(order.values) < num_all:
        num_unseen = int.from_bytes(mask.tobytes(), "little").bit_count() - len(values)
    if not num_unseen:
        num_all = len(values)
    most_kept = min(sampling.top_k or num_all, num_all)
    weights = np.exp((values[:most_kept] - values[0]) / sampling.temperature)
    mass = np.cumsum(weights)
    totals = [mass[-1]]
    if len(mass) < most_kept or (most_kept == num_all and total != 0.0):
        num_unseen = min(num_unseen, most_kept - len(mass))
        rest = _most_rest(order, float(values[0]), num_unseen, total, sampling.temperature)
        totals = [mass[-1] * (1 - MARGIN), (mass[-1] + rest) * (1 + MARGIN)]
    found = {kept_by_mass(weights, mass, most_kept, one, sampling) for one in totals}
    if len(found) > 1:
        return None
    [num_kept] = found
    tokens = {draw_kept(values, ids, weights, mass, num_kept, one, sampling, u) for one in totals}
    return tokens.pop() if len(tokens) == 1 else None


def _most_rest(
    order: Order, highest: float, num_unseen: int, total: float, temperature: float
) -> float:
    """The most that `num_unseen` tokens outside `order` can weigh, where `highest` weighs 1: none
    has a higher logit than the last one inside, and with those inside they make up `total`, 0
    where that is not known.
    """
    if not num_unseen:
        return 0.0
    rest = num_unseen * math.exp((order.values[-1] - highest) / temperature)
    exponent = float(order.values[0] - highest) / temperature
    if total and exponent < _MOST_EXPONENT:
        known = np.exp((order.values - order.values[0]) / temperature).sum()
        rest = min(rest, (total * (1 + MARGIN) - known) * math.exp(exponent))
    return max(rest, 0.0)


def _lets_through(mask: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool, of each of `ids`; see luceasync.ranking.logits.Masks."""
    found: np.ndarray = (mask[ids >> 5] >> (ids & 31) & 1).astype(bool)
    return found
