"""Sampling as plain loops over the whole vocabulary: the slow truth beside
luceasync.engine.sampling.choose.

Edits are made in float32, as there, so that both rank the same numbers; all else is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from luceasync.request import Sampling

STEP = 0.25  # of logits: tokens within one are drawn in order of their ids


def edit_logits(
    logits: Sequence[float],
    sampling: Sampling,
    prompt_ids: Sequence[int],
    generated_ids: Sequence[int],
) -> list[float]:
    """Bias, then repetition, frequency and presence penalties, one token at a time."""
    edited = [np.float32(x) for x in logits]
    for token, bias in sampling.logit_bias.items():
        edited[token] = edited[token] + np.float32(bias)
    repetition = np.float32(sampling.repetition_penalty)
    for token in {*prompt_ids, *generated_ids}:
        x = edited[token]
        edited[token] = x / repetition if x > 0 else x * repetition
    for token in set(generated_ids):
        count = list(generated_ids).count(token)
        taken = sampling.frequency_penalty * count + sampling.presence_penalty
        edited[token] = edited[token] - np.float32(taken)
    return [float(x) for x in edited]


def kept_tokens(logits: Sequence[float], sampling: Sampling) -> list[tuple[int, float]]:
    """What top_k, top_p and min_p leave: (token id, weight), most probable first, equals by id."""
    highest = max(logits)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    kept = [(t, math.exp((logits[t] - highest) / sampling.temperature)) for t in ranked]
    if sampling.top_p < 1.0:
        total, mass, nucleus = sum(w for _, w in kept), 0.0, []
        for token, weight in kept:
            nucleus.append((token, weight))
            mass += weight
            if mass >= sampling.top_p * total:
                break
        kept = nucleus
    return [(token, weight) for token, weight in kept if weight >= sampling.min_p]


def choose_token(logits: Sequence[float], sampling: Sampling, u: float) -> int:
    """The token of edited `logits` that `u` falls on; the first highest at temperature 0."""
    if sampling.temperature == 0.0:
        return max(range(len(logits)), key=lambda token: (logits[token], -token))
    kept = sorted(
        kept_tokens(logits, sampling),
        key=lambda pair: (-math.floor(logits[pair[0]] / STEP), pair[0]),
    )
    target, mass = u * sum(weight for _, weight in kept), 0.0
    for token, weight in kept:
        mass += weight
        if mass > target:
            return token
    return [token for token, weight in kept if weight > 0.0][-1]


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Natural-log probabilities."""
    highest = max(logits)
    log_total = highest + math.log(sum(math.exp(x - highest) for x in logits))
    return [x - log_total for x in logits]
