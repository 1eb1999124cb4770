"""What an engine runs before it is ready, for nobody: a prompt, then steps of every kind.

Kernels are compiled and rounds of speculation are timed then, and not while somebody waits. Has a
lane for that long and leaves it empty; knows no queue and nothing of prefixes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from luceasync.dflash.adapt import Plan, Shape
from luceasync.engine.decoding import Decoding, choose_next
from luceasync.engine.generation import Generation
from luceasync.engine.prepared import Prepared
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.steps import Prefiller
from luceasync.ranking.local import LocalLogits
from luceasync.request import Sampling
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.tokenizer import Tokenizer

LANE = 0
NUM_TURNS = 5  # what was timed as often is believed for long; see dflash.tally.StepCosts.is_due
LIMIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Part:
    """What is run: a prompt in chunks, then steps until there are `max_tokens` tokens."""

    prompt_ids: tuple[int, ...]
    chunk_tokens: int
    max_tokens: int
    num_steps: int


def part_for(
    chunk_tokens: int,
    max_ctx_tokens: int,
    vocab_size: int,
    shapes: Sequence[Shape],
    *,
    computes_beside: bool,
    num_turns: int = NUM_TURNS,
) -> Part:
    """Where rounds have `shapes` `num_turns` of all kinds of steps, where there are none one plain
    step. Where there are kernels to compile (`computes_beside`: see luceasync.engine.pump) the
    prompt is a whole chunk, elsewhere something to start from; half the context is left to decode.
    """
    num_tokens = chunk_tokens if computes_beside else 16
    num_tokens = max(1, min(num_tokens, max_ctx_tokens // 2))
    prompt_ids = tuple(i % vocab_size for i in range(num_tokens))
    num_steps = num_turns * (len(shapes) + 1) if shapes else 1
    return Part(prompt_ids, chunk_tokens, max_ctx_tokens - num_tokens, num_steps)


def in_turns(shapes: Sequence[Shape]) -> Callable[[Sequence[int]], Plan]:
    """The plans of steps that take turns: a round of each shape, a plain step, and again."""
    kinds = itertools.cycle((*shapes, None))

    def plan(lanes: Sequence[int]) -> Plan:
        shape = next(kinds)
        return Plan(shape, () if shape is None else tuple(lanes), is_measured=True)

    return plan


def rehearse(
    target: Prefiller,
    decoding: Decoding,
    tokenizer: Tokenizer,
    part: Part,
    *,
    limit_s: float = LIMIT_S,
) -> None:
    """Run the prompt, then as many of the steps, which are greedy, as begin within `limit_s`.
    Raises what running them raises.
    """
    generation = Generation(_prepared(tokenizer, part))
    target.reset(LANE)
    decoding.start(LANE)
    generation.start(LANE)
    for begin in range(0, len(part.prompt_ids), part.chunk_tokens):
        chunk = part.prompt_ids[begin : begin + part.chunk_tokens]
        logits = target.prefill(LANE, begin, chunk, project=True)
        decoding.prefilled(LANE, begin, len(chunk))
    assert logits is not None, "a prompt has tokens"
    choose_next([generation], LocalLogits(logits[None]))
    end_at = time.monotonic() + limit_s
    for _ in range(part.num_steps):
        if generation.has_ended or time.monotonic() > end_at:
            break
        decoding.step([generation], alone=True, meanwhile=nothing)
    decoding.start(LANE)
    target.reset(LANE)


def _prepared(tokenizer: Tokenizer, part: Part) -> Prepared:
    return Prepared(
        stream_id=0,
        index=0,
        prompt_ids=part.prompt_ids,
        max_tokens=part.max_tokens,
        stop_ids=frozenset(),
        sampling=Sampling(),
        seed=0,
        counts=None,
        top_logprobs=None,
        tokenizer=tokenizer,
        detokenizer=Detokenizer(tokenizer),
    )
