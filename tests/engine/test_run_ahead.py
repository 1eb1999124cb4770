"""An engine whose steps begin before they are asked for, over captured passes on a CPU: answers are
those of an engine that waits for each token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from luceasync.config import DraftConfig
from luceasync.engine.engine import LocalEngine
from luceasync.models.files import read_spec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.ranking.logits import Logits
from luceasync.request import Request, Sampling, TokenPrompt
from tests.engines import running
from tests.pipeline.recaptured import recaptured

PROMPTS = [tuple(3 + (n * n + i) % 400 for i in range(n)) for n in (5, 70, 13, 61)]


@dataclass(frozen=True)
class Answer:
    """What a client sees."""

    ids: tuple[int, ...]
    text: str
    reason: str
    num_cached: int = field(compare=False)


async def ask(engine: LocalEngine, prompt: tuple[int, ...], **fields) -> Answer:
    stream = await engine.open(Request(TokenPrompt(prompt), ignore_eos=True, **fields))
    deltas = [delta async for delta in stream]
    finish = deltas[-1].finish
    assert finish is not None
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    text = "".join(delta.text for delta in deltas)
    return Answer(ids, text, finish.reason, finish.usage.cached_tokens)


async def converse(engine: LocalEngine) -> list[Answer]:
    """Answers beside each other, of several lengths, one of them drawn; then each again, which a
    stop ends, and what takes up as much as can be of that.
    """
    drawn = Sampling(temperature=1.0, seed=1)
    said = await asyncio.gather(
        ask(engine, PROMPTS[0], max_tokens=40),
        ask(engine, PROMPTS[1], max_tokens=9),
        ask(engine, PROMPTS[2], max_tokens=30, sampling=drawn),
        ask(engine, PROMPTS[3], max_tokens=70),
    )
    for prompt, answer in zip(PROMPTS, [*said], strict=True):
        middle = len(answer.text) // 2
        stop = (answer.text[middle : middle + 3],)
        again = await ask(engine, prompt, max_tokens=40, stop=stop)
        after = await ask(engine, (*prompt, *again.ids, 7, 8, 9), max_tokens=20)
        assert after.num_cached >= len(prompt)
        said += [again, after]
    return said


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("parallel", [3, 1])
async def test_answers_are_those_of_an_engine_that_waits_for_each_token(
    tiny_dir: Path, parallel: int, monkeypatch: pytest.MonkeyPatch
):
    async with running(tiny_dir, parallel=parallel, draft=DraftConfig("none")) as engine:
        expected = await converse(engine)
    # Of a CPU's sizes, verify passes are captured with one lane alone.
    for draft in ("none", "lookup") if parallel == 1 else ("none",):
        launched = await launched_in(tiny_dir, parallel, draft, expected, monkeypatch)
        if read_spec(tiny_dir).has_end_state:
            assert all(launched)
        elif draft == "none":
            assert launched.count(False) > len(launched) / 2, "most steps had run ahead"
        else:
            assert launched.count(False), "steps after which nothing could be copied"
    assert {answer.reason for answer in expected} == {"stop", "length"}


async def launched_in(
    model_dir: Path,
    parallel: int,
    draft: Literal["none", "lookup"],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> list[bool]:
    """Whether each plain step was launched when it was asked for, and not before, in an engine that
    gives the expected answers.
    """
    decode, launched = LayerSplitBackend.decode, []
    with recaptured() as replayed:

        def heard(self: LayerSplitBackend, *step) -> Logits:
            before = len(replayed)
            logits = decode(self, *step)
            launched.append(len(replayed) > before)
            return logits

        monkeypatch.setattr(LayerSplitBackend, "decode", heard)
        async with running(model_dir, parallel=parallel, draft=DraftConfig(draft)) as engine:
            assert await converse(engine) == expected
    monkeypatch.undo()
    return launched
