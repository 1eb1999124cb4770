"""Filters ranked candidates and draws one of them, by a seeded number for each position.

Pure, on the host; does not know tensors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from luceasync.ranking.logits import WholeRow
from luceasync.request import Sampling

# Logits: a draw walks steps of this size from the most probable tokens down, and ids within one
# step. Rounding often swaps neighbours in a ranking, but hardly ever moves a token to another step:
# the same draw then gives the same token, whichever device computed the logits.
STEP = 0.25
# relative error of a sum over the whole vocabulary that was computed in float32
MARGIN = 1e-5
MAX_TEMPERATURE = 1e30  # in the range of float32; beyond it, such a sum is meaningless
_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` (its low 64 bits) and `position` >= 0 alone.

    It is draw number `position` of SplitMix64 seeded with `seed` (Steele, Lea, Flood: Fast
    Splittable Pseudorandom Number Generators, OOPSLA 2014), which is a counter put through a
    finaliser. No state is kept, so other requests, batching and speculation cannot change a draw.
    """
    return (_mix(seed + (position + 1) * _GOLDEN_GAMMA) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of choice `index` of a request drawn with `seed`; choice 0 keeps it."""
    return seed & _MASK_64 if index == 0 else _mix(seed ^ _mix(index))


def _mix(x: int) -> int:
    x &= _MASK_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return x ^ (x >> 31)


def draw(
    values: np.ndarray, ids: np.ndarray, num_vocab: int, total: float, sampling: Sampling, u: float
) -> int | None:
    """The token that `u` in [0, 1) falls on; None if these candidates do not decide it.

    `values` float64 `[n]`: the n highest logits of `num_vocab`, descending; `ids` `[n]`: of equal
    ones in any order. The highest is finite. `total`: the sum of exp((value - highest) /
    temperature) over the vocabulary; not read where top_k leaves tokens out, nor where it is 0 (n
    is everything).
    """
    if not len(values):
        return None
    num_kept = min(sampling.top_k or num_vocab, num_vocab)
    weights = np.exp((values[:num_kept] - values[0]) / sampling.temperature)
    mass = weights.cumsum()  # summed one by one, so a prefix has the same bits in any ranking
    if num_kept < num_vocab or total == 0.0:
        if len(mass) < num_kept:
            return None
        total = mass[-1]
    num_kept = kept_by_mass(weights, mass, num_kept, total, sampling)
    return draw_kept(values, ids, weights, mass, num_kept, total, sampling, u)


def kept_by_mass(
    weights: np.ndarray, mass: np.ndarray, num_kept: int, total: float, sampling: Sampling
) -> int:
    """How many of `num_kept` tokens top_p and min_p keep; `num_kept` if they keep more than the
    known ones. `weights`: of the known tokens; `mass`: their cumulative sums."""
    num_known = len(mass)
    if sampling.top_p < 1.0:
        reached = int(mass.searchsorted(sampling.top_p * total))
        num_kept = min(num_kept, reached + 1) if reached < num_known else num_kept
    if sampling.min_p > 0.0:
        above = int((-weights).searchsorted(-sampling.min_p, side="right"))
        num_kept = min(num_kept, above) if above < num_known else num_kept
    return num_kept


def draw_kept(
    values: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    mass: np.ndarray,
    num_kept: int,
    total: float,
    sampling: Sampling,
    u: float,
) -> int | None:
    """Draw among the tokens that filters keep; see `draw` and `kept_by_mass`."""
    is_filtered = _is_filtered(sampling)
    if num_kept > len(mass) and is_filtered:
        return None
    if num_kept < len(values) and values[num_kept - 1] == values[num_kept]:
        ids = _with_lowest_first(values, ids, num_kept)
    target = u * (mass[num_kept - 1] if is_filtered else total)
    return _fall(values[:num_kept], ids, weights, mass[:num_kept], target, num_kept)


def unmasked(
    values: np.ndarray, ids: np.ndarray, num_vocab: int, total: float, sampling: Sampling, u: float
) -> int | None:
    """The token that `draw` gives if masking other tokens cannot change it; None if it can, or if
    that is not known. Costs a fraction of a draw.

    `values`, `ids`: as in `draw`, but ties with the last one may be missing. It is the token on
    which the lowest `u` falls: its share begins at 0, and grows when other tokens lose theirs.
    Filters keep it under any mask if its logit is the highest, or if they keep its whole step.
    """
    highest = float(values[0])
    num_first = int(np.count_nonzero(values >= math.floor(highest / STEP) * STEP))
    at = int(ids[:num_first].argmin()) if num_first > 1 else 0
    num_kept = min(sampling.top_k or num_vocab, num_vocab)
    is_kept = values[at] == highest or (num_first <= num_kept and not _is_filtered(sampling))
    weight = math.exp((values[at] - highest) / sampling.temperature)
    is_known = num_first < len(values) and sampling.temperature < MAX_TEMPERATURE
    if not (is_known and is_kept and u < weight):
        return None
    if num_kept < num_vocab or total == 0.0:
        if len(values) < num_kept:
            return None
        total = np.exp((values[:num_kept] - highest) / sampling.temperature).sum()
    return int(ids[at]) if u * total * (1 + MARGIN) < weight else None


def _is_filtered(sampling: Sampling) -> bool:
    """Whether the number of kept tokens depends on weights."""
    return sampling.top_p < 1.0 or sampling.min_p > 0.0


def _with_lowest_first(values: np.ndarray, ids: np.ndarray, num_kept: int) -> np.ndarray:
    """`ids`, sorted among tokens with equal values on both sides of the border of the kept ones."""
    begin, end = (
        int((-values).searchsorted(-values[num_kept], side=side)) for side in ("left", "right")
    )
    return np.concatenate([ids[:begin], np.sort(ids[begin:end]), ids[end:]])


def _fall(
    values: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    mass: np.ndarray,
    target: float,
    num_kept: int,
) -> int | None:
    """The token at which the cumulative weight of the kept tokens, in the order of STEP, passes
    `target`; None if that is beyond the steps that are completely known. `mass`: the sums in order
    of value, which are equal at the borders of steps."""
    num_known = len(mass)
    at = int(mass.searchsorted(target, side="right"))
    if at == num_known:
        if num_kept > num_known:
            return None
        # If rounding puts the target at the last border, this is the last token with any
        # probability.
        at = int(mass.searchsorted(mass[-1]))
    steps = -np.floor(values / STEP)
    begin, end = (int(steps.searchsorted(steps[at], side=side)) for side in ("left", "right"))
    if num_kept > num_known and end == num_known:
        return None
    order = ids[begin:end].argsort()
    inside = weights[begin:end][order].cumsum()
    if begin:
        inside += mass[begin - 1]
    place = min(inside.searchsorted(target, side="right"), inside.searchsorted(inside[-1]))
    return int(ids[begin + order[place]])


class TokenOrder(NamedTuple):
    """A row's most probable tokens by logit, float64 and int64 `[ranked]`, of `num_all` allowed
    tokens. Equal ones are in the order of the input."""

    values: np.ndarray
    ids: np.ndarray
    num_all: int


def known_order(values: np.ndarray, ids: np.ndarray, num_vocab: int) -> TokenOrder:
    """The order that a top-k selection proves: ties with its last value may be missing."""
    if values[-1] == -np.inf:  # under a mask: all allowed tokens are before it
        return _possible(values, ids)
    if len(values) < num_vocab:
        num_certain = (-values).searchsorted(-values[-1])
        values, ids = values[:num_certain], ids[:num_certain]
    return TokenOrder(values, ids.astype(np.int64), num_vocab)


def whole_order(row: WholeRow) -> TokenOrder:
    """The order of all allowed tokens."""
    return _possible(row.values, row.ids)


def _possible(values: np.ndarray, ids: np.ndarray) -> TokenOrder:
    """The order of a complete ranking, up to the tokens that are masked."""
    num_all = int((-values).searchsorted(np.inf))
    return TokenOrder(values[:num_all], ids[:num_all].astype(np.int64), num_all)


_MAX_EXPONENT = 700.0  # exp of more overflows float64


def draw_masked(
    order: TokenOrder, total: float, sampling: Sampling, u: float, mask: np.ndarray
) -> int | None:
    """What `draw` gives of the tokens that `mask` allows, from candidates that were ranked without
    it; None if these do not decide it.

    `order` and `total` are of the unmasked row. The mass under the mask is known except for that of
    tokens outside `order`: the draw is decided if it is the same with all of that mass and with
    none of it.
    """
    may_come = _lets_through(mask, order.ids)
    values, ids = order.values[may_come], order.ids[may_come]
    if not len(values) or sampling.temperature > MAX_TEMPERATURE:
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
    order: TokenOrder, highest: float, num_unseen: int, total: float, temperature: float
) -> float:
    """The most that `num_unseen` tokens outside `order` can weigh if `highest` weighs 1: none has a
    higher logit than the last one inside, and all together weigh `total`, 0 if that is not known.
    """
    if not num_unseen:
        return 0.0
    rest = num_unseen * math.exp((order.values[-1] - highest) / temperature)
    exponent = float(order.values[0] - highest) / temperature
    if total and exponent < _MAX_EXPONENT:
        known = np.exp((order.values - order.values[0]) / temperature).sum()
        rest = min(rest, (total * (1 + MARGIN) - known) * math.exp(exponent))
    return max(rest, 0.0)


def _lets_through(mask: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """bool, for each of `ids`; see luceasync.ranking.logits.Masks."""
    found: np.ndarray = (mask[ids >> 5] >> (ids & 31) & 1).astype(bool)
    return found
