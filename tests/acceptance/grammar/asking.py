"""Engines over tiny random models and their drafters, and their answers to schemas.

Owns how they are started, on which devices and in which processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig, PlacementConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.errors import RequestError
from luceasync.request import ChatPrompt, Constraint, Request, Sampling
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.acceptance.check_processes import placed
from tests.acceptance.grammar.cases import Case
from tests.stages import in_stages

PARALLEL = 8
# A random model would never close a string by itself.
CLOSING, BIAS = '"}],:0 ', 6.0
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"draft_dir": "none"},
    "chain": {},
    "tree": {"ddtree": True, "ddtree_budget": 12},
}
Places = Literal["one", "groups", "remote"]
Answer = tuple[str, str]  # the text, and why it ended


@dataclass(frozen=True, slots=True)
class Asking:
    """How each schema is asked for."""

    max_tokens: int
    temperature: float = 1.0
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    words: dict[int, float] = field(default_factory=dict)

    def request(self, case: Case, seed: int) -> Request:
        return Request(
            ChatPrompt([{"role": "user", "content": case.name}]),
            sampling=Sampling(temperature=self.temperature, seed=seed, logit_bias=self.words),
            max_tokens=self.max_tokens,
            num_choices=self.num_choices,
            stop=self.stop,
            constraint=Constraint("json_schema", json.dumps(case.schema), "schema"),
        )


def biased(model_dir: Path) -> dict[int, float]:
    """Logit biases that let a random model come to an end."""
    tokenizer = Tokenizer.load(model_dir)
    return {token: BIAS for char in CLOSING for token in tokenizer.encode(char)[:1]}


def save_models(family: str, folder: Path) -> tuple[Path, Path]:
    """Write a target and its drafter."""
    model_dir = tiny.save(tiny.build(family), folder / "model")
    return model_dir, tiny.save_draft(folder / "draft", tiny.draft_config())


@contextmanager
def placement(places: Places, folder: Path) -> Iterator[PlacementConfig]:
    """Where the layers lie: on one device, in three stages, or the last ones in another process."""
    if places == "groups":
        with in_stages(3):
            yield PlacementConfig()
    else:
        yield placed(folder, "two", "auto") if places == "remote" else PlacementConfig()


@asynccontextmanager
async def running(
    models: tuple[Path, Path], draft: str, where: PlacementConfig
) -> AsyncIterator[LocalEngine]:
    """An engine over the models."""
    model_dir, draft_dir = models
    config = Config(
        model=ModelConfig(model_dir=model_dir, dtype="fp32"),
        placement=where,
        engine=EngineConfig(max_ctx_tokens=1024, parallel=PARALLEL),
        draft=DraftConfig(**{"draft_dir": draft_dir, **DRAFTS[draft]}),
    )
    async with build_engine(config) as engine:
        await engine.load()
        yield engine


async def answers(
    engine: LocalEngine, cases: Sequence[Case], asking: Asking
) -> list[tuple[Answer, ...]]:
    """The choices of each case, as many at once as there are lanes."""
    turns = asyncio.Semaphore(PARALLEL)

    async def ask(number: int, case: Case) -> tuple[Answer, ...]:
        texts, reasons = [""] * asking.num_choices, [""] * asking.num_choices
        async with turns:
            try:
                async for delta in await engine.open(asking.request(case, number)):
                    texts[delta.index] += delta.text
                    if delta.finish is not None:
                        reasons[delta.index] = delta.finish.error or delta.finish.reason
            except RequestError as error:
                return (("", str(error)),)
        return tuple(zip(texts, reasons, strict=True))

    return list(await asyncio.gather(*(ask(i, case) for i, case in enumerate(cases))))
