"""Which candidates may be drawn, and which is: seeded, by a number for each position.

Pure, on the host. Knows no tensors; which candidates there are is told to it.
"""

from __future__ import annotations

import numpy as np

from luceasync.request import Sampling

# Of logits: a draw goes through steps of this size from the most probable tokens down, and through
# ids within one. Rounding swaps neighbours in a ranking all the time, but hardly ever moves a token
# to another step: the same draw then means the same token, whatever computed the logits.
STEP = 0.25
_MASK_64 = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on `seed` (its low 64 bits) and `position` >= 0 alone.

    It is draw number `position` of SplitMix64 seeded with `seed` (Steele, Lea, Flood: Fast
    Splittable Pseudorandom Number Generators, OOPSLA 2014), which is a counter put through a
    finaliser. No state is kept, so what else runs, batching and speculation cannot change a draw.
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
    """The token that `u` in [0, 1) falls on, or None when these candidates do not decide it.

    `values` float64 `[n]`: the n highest logits of `num_vocab`, descending; `ids` `[n]`: of equal
    ones in any order. The highest is finite. `total`: the sum of exp((value - highest) /
    temperature) over the vocabulary; not read where top_k leaves tokens out, nor where it is 0 (n
    is everything).
    """
    if not len(values):
        return None
    num_kept = min(sampling.top_k or num_vocab, num_vocab)
    weights = np.exp((values[:num_kept] - values[0]) / sampling.temperature)
    mass = np.cumsum(weights)  # one after the other, so a prefix has the same bits in any ranking
    num_known = len(mass)
    if num_kept < num_vocab or total == 0.0:
        if num_known < num_kept:
            return None
        total = mass[-1]
    filtered = sampling.top_p < 1.0 or sampling.min_p > 0.0
    if sampling.top_p < 1.0:
        reached = int(np.searchsorted(mass, sampling.top_p * total))
        num_kept = min(num_kept, reached + 1) if reached < num_known else num_kept
    if sampling.min_p > 0.0:
        above = int(np.searchsorted(-weights, -sampling.min_p, side="right"))
        num_kept = min(num_kept, above) if above < num_known else num_kept
    if num_kept > num_known and filtered:
        return None
    if num_kept < len(values) and values[num_kept - 1] == values[num_kept]:
        ids = _with_lowest_first(values, ids, num_kept)
    target = u * (mass[num_kept - 1] if filtered else total)
    return _fall(values[:num_kept], ids, weights, mass[:num_kept], target, num_kept)


def _with_lowest_first(values: np.ndarray, ids: np.ndarray, num_kept: int) -> np.ndarray:
    """`ids`, where those are in order whose equal values lie on both sides of what is kept."""
    begin, end = (
        int(np.searchsorted(-values, -values[num_kept], side=side)) for side in ("left", "right")
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
    """The token at which the summed weights of the kept ones, in the order of STEP, pass `target`;
    None where that is beyond the steps that are known whole. `mass`: the sums in order of value,
    which are the same at the borders of steps.
    """
    num_known = len(mass)
    at = int(np.searchsorted(mass, target, side="right"))
    if at == num_known:
        if num_kept > num_known:
            return None
        # Rounded up to the last border, it is the last token with any probability.
        at = int(np.searchsorted(mass, mass[-1]))
    steps = -np.floor(values / STEP)
    begin, end = (int(np.searchsorted(steps, steps[at], side=side)) for side in ("left", "right"))
    if num_kept > num_known and end == num_known:
        return None
    order = np.argsort(ids[begin:end])
    inside = np.cumsum(weights[begin:end][order])
    if begin:
        inside += mass[begin - 1]
    place = min(np.searchsorted(inside, target, side="right"), np.searchsorted(inside, inside[-1]))
    return int(ids[begin + order[place]])
