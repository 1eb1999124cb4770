"""The fields by which OpenAI's endpoints say how tokens are chosen and when they end.

Owns their ranges and what an absent one means. Knows nothing of prompts.
"""

from __future__ import annotations

import re

from luceasync.request import Sampling
from luceasync.server.checks import at_most, in_range, in_range_or, refuse
from luceasync.server.openai.constraints import ConstraintBody

MAX_CHOICES = 16
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_BIASES = 1024
MAX_PRIORITY = 1000


class SamplingBody(ConstraintBody):
    """The fields that are read; null is the same as absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    min_tokens: int | None = None


def sampling_of(body: SamplingBody) -> Sampling:
    """Absent fields mean what OpenAI says they mean, so an absent temperature is 1."""
    top_p = in_range_or(1.0, "top_p", body.top_p, 0.0, 1.0)
    if top_p == 0:
        refuse("top_p", top_p, "a number above 0, at most 1")
    return Sampling(
        temperature=in_range_or(1.0, "temperature", body.temperature, 0.0, 2.0),
        top_k=max(0, in_range_or(0, "top_k", body.top_k, -1, 2**31 - 1)),
        top_p=top_p,
        min_p=in_range_or(0.0, "min_p", body.min_p, 0.0, 1.0),
        repetition_penalty=in_range_or(
            1.0, "repetition_penalty", body.repetition_penalty, 0.01, 100.0
        ),
        frequency_penalty=in_range_or(0.0, "frequency_penalty", body.frequency_penalty, -2.0, 2.0),
        presence_penalty=in_range_or(0.0, "presence_penalty", body.presence_penalty, -2.0, 2.0),
        logit_bias=_logit_bias(body),
        seed=None if body.seed is None else in_range("seed", body.seed, -(2**63), 2**63 - 1),
    )


def stops_of(body: SamplingBody) -> tuple[str, ...]:
    """The stop strings."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    at_most("stop", stops, MAX_STOPS, "strings")
    for stop in stops:
        if not 0 < len(stop) <= MAX_STOP_CHARS:
            refuse("stop", stop, f"a string of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def min_tokens_of(body: SamplingBody, max_tokens: int | None) -> int:
    """Before which no end comes, as vLLM has it."""
    least = in_range_or(0, "min_tokens", body.min_tokens, 0, 2**31 - 1)
    if max_tokens is not None and least > max_tokens:
        refuse("min_tokens", least, f"at most {max_tokens}, as many as may come")
    return least


def priority_of(priority: int | None) -> int:
    """Which of one client's requests comes first: the lowest."""
    return in_range_or(0, "priority", priority, -MAX_PRIORITY, MAX_PRIORITY)


def num_choices_of(body: SamplingBody) -> int:
    """How many answers one prompt gets."""
    return in_range_or(1, "n", body.n, 1, MAX_CHOICES)


def _logit_bias(body: SamplingBody) -> dict[int, float]:
    biases: dict[int, float] = {}
    at_most("logit_bias", body.logit_bias or (), MAX_BIASES, "tokens")
    for key, bias in (body.logit_bias or {}).items():
        param = f"logit_bias.{key}"
        if re.fullmatch(r"[0-9]{1,9}", key) is None:
            refuse(param, key, "a token id, a whole number from 0 on")
        biases[int(key)] = in_range(param, bias, -100.0, 100.0)
    return biases
