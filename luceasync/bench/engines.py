"""Engines with models of random weights, started repeatedly on one cache directory.

A model is a directory, as for a server: its tokenizer and template are those of the bundled model.
"""

from __future__ import annotations

import asyncio
import shutil
import string
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from luceasync.bench.model import register_random_format, write_model
from luceasync.bench.shapes import Shape
from luceasync.config import (
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.disk_cache.codec import parse_file_name
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.models.precision import Dtype
from luceasync.request import ChatPrompt, Finish, Prompt, Request, Sampling
from luceasync.text.tokenizer import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
MEMORY_BYTES = 12 << 30
WRITE_DEADLINE_S = 120.0
POLL_S = 0.005
NUM_QUIET_POLLS = 20
SENTENCE = "The prefix of this conversation has been read before and need not be read again. "

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class EngineSetup:
    """The settings that engines have in common. `cache_dir` None: nothing is written. `pool_tokens`
    None: lanes hold their whole context.
    """

    model_dir: Path
    device: str
    dtype: Dtype
    max_ctx_tokens: int
    cache_dir: Path | None = None
    memory_bytes: int = MEMORY_BYTES
    parallel: int = 1
    interval_tokens: int = 2048
    pool_tokens: int | None = None

    @property
    def config(self) -> Config:
        return Config(
            model=ModelConfig(model_dir=self.model_dir, dtype=self.dtype),
            placement=PlacementConfig(device=self.device),
            engine=EngineConfig(parallel=self.parallel, max_ctx_tokens=self.max_ctx_tokens),
            cache=CacheConfig(
                memory_bytes=self.memory_bytes,
                cache_dir=self.cache_dir,
                min_tokens=1,
                interval_tokens=self.interval_tokens,
            ),
            draft=DraftConfig(draft_dir="none"),
            kvflash=KvFlashConfig(pool_tokens=self.pool_tokens),
        )

    @property
    def files(self) -> list[Path]:
        """Node files in the cache directory."""
        if self.cache_dir is None:
            return []
        found = self.cache_dir.glob("*/*")
        return sorted(path for path in found if parse_file_name(path.name) is not None)


def write_random_model(folder: Path, shape: Shape, dtype: Dtype, max_positions: int) -> Path:
    """Write a model of random weights that engines in this process can load."""
    folder.mkdir(parents=True, exist_ok=True)
    register_random_format()
    write_model(folder, dict(shape) | {"max_position_embeddings": max_positions}, dtype)
    for name in TOKENIZER_FILES:
        if (BUNDLED_MODEL_DIR / name).exists():
            shutil.copy(BUNDLED_MODEL_DIR / name, folder)
    return folder


@asynccontextmanager
async def engine_of(setup: EngineSetup) -> AsyncIterator[LocalEngine]:
    """A loaded engine with no state but its files."""
    async with build_engine(setup.config) as engine:
        await engine.load()
        yield engine


@dataclass(frozen=True)
class Answered:
    """An answer. `first_s` is the time from the request to its first token, in seconds."""

    first_s: float
    finish: Finish
    text: str
    token_ids: list[int]


async def ask(
    engine: LocalEngine,
    prompt: Prompt | Messages,
    max_tokens: int,
    sampling: Sampling | None = None,
) -> Answered:
    """One answer of `max_tokens` tokens, continued after an end-of-sequence token."""
    started, first_s, text, ids = time.perf_counter(), 0.0, "", list[int]()
    stream = await engine.open(
        Request(
            _prompt_of(prompt),
            sampling=sampling or Sampling(),
            max_tokens=max_tokens,
            ignore_eos=True,
        )
    )
    async for delta in stream:
        if delta.token_ids and not first_s:
            first_s = time.perf_counter() - started
        text += delta.words
        ids += delta.token_ids
        if delta.finish is not None:
            return Answered(first_s, delta.finish, text, ids)
    raise AssertionError("a stream ends with a finish")


def _prompt_of(prompt: Prompt | Messages) -> Prompt:
    return ChatPrompt([*prompt]) if isinstance(prompt, list) else prompt


async def wait_until_written(engine: LocalEngine) -> None:
    """Wait until all nodes are on disk. Writes are queued a moment after an answer, so the engine
    must be idle for several polls.
    """
    num_quiet = 0
    async with asyncio.timeout(WRITE_DEADLINE_S):
        await engine.flush()
        while num_quiet < NUM_QUIET_POLLS:
            await asyncio.sleep(POLL_S)
            status = engine.status()
            is_busy = status.num_running or status.cache is None or status.cache.num_unwritten
            num_quiet = 0 if is_busy else num_quiet + 1


def user(text: str) -> Messages:
    """A conversation of one question."""
    return [{"role": "user", "content": text}]


def text_of(num_tokens: int, head: str = "") -> str:
    """A text of about `num_tokens` tokens. Texts of different `head` share no prefix."""
    tokenizer = Tokenizer.load(BUNDLED_MODEL_DIR)
    per_sentence = len(tokenizer.encode(SENTENCE * 64)) / 64
    return head + SENTENCE * int(num_tokens / per_sentence)


def letters() -> Sampling:
    """Sampling that generates letters with any weights, so that an answer that is sent back is
    encoded to the same tokens.
    """
    encode = Tokenizer.load(BUNDLED_MODEL_DIR).encode
    return Sampling(logit_bias={encode(letter)[0]: 100.0 for letter in string.ascii_lowercase})
