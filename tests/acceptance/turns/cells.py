"""The outcome of a flow over one model, by kind of server, and the rules that it breaks."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from tests.acceptance.turns.client import Asked, Client
from tests.acceptance.turns.flow import Flow, Kind, Size
from tests.acceptance.turns.flows import FLOWS
from tests.acceptance.turns.models import MAX_CTX_TOKENS, Model, ModelName, TemplateName
from tests.acceptance.turns.servers import Servers

MEMORY_BYTES = 1 << 30
LITTLE_STATES = 4  # that fit into little memory, beside a few hundred rows
LITTLE_ROWS = 900
MAX_WRITTEN = 1.1  # of the bytes of new state


@dataclass(frozen=True, slots=True)
class Row:
    """Cells that are compared with one server that keeps nothing."""

    flow: str
    model_name: ModelName
    template: TemplateName
    chunk_tokens: int
    kinds: tuple[Kind, ...]
    size: Size

    @property
    def name(self) -> str:
        return f"{self.model_name} {self.template} {self.chunk_tokens} {self.flow}"


@dataclass(frozen=True, slots=True)
class Cell:
    """The outcome of one flow with one kind of server.

    `worst`: most tokens that one request ran again. `written`: bytes over those of new state, None
    if nothing is written or counted; `max_written`: what is allowed, given the boundaries of its
    turns. `faults`: the rules it breaks, in words.
    """

    row: str
    kind: Kind
    num_cached: int
    num_ideal: int
    worst: int
    written: float | None
    max_written: float
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.num_cached}/{self.num_ideal} (-{self.worst})"
        written = "" if self.written is None else f" {self.written:.2f}<{self.max_written:.2f}"
        return text + written + " !" * bool(self.faults)


def hold(row: Row, model: Model) -> list[Cell]:
    """Run `cells_of` in its own process, beside others."""
    import torch

    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    return asyncio.run(cells_of(row, model))


async def cells_of(row: Row, model: Model) -> list[Cell]:
    """Hold the row's conversation with every kind of server."""
    flow = FLOWS[row.flow]
    cold, _ = await _held(flow, row, model, None)
    num_requests = len(cold)
    found = []
    for kind in row.kinds:
        asked, written_bytes = await _held(flow, row, model, kind, num_requests)
        found.append(_cell(row, model, kind, asked, cold, written_bytes))
    return found


async def _held(
    flow: Flow, row: Row, model: Model, kind: Kind | None, num_requests: int = 0
) -> tuple[list[Asked], int]:
    """The choices of a flow, and the bytes written; `kind` None: nothing is kept."""
    with tempfile.TemporaryDirectory(prefix="turns-") as folder:
        has_directory = kind in ("restarts", "one restart", "drafted, restarts")
        config = Config(
            model=ModelConfig(model_dir=model.model_dir, dtype="fp32"),
            placement=PlacementConfig(devices=("cpu",)),
            engine=EngineConfig(
                parallel=flow.parallel,
                max_ctx_tokens=MAX_CTX_TOKENS,
                prefill_chunk_tokens=row.chunk_tokens,
            ),
            cache=CacheConfig(
                cache_dir=Path(folder) / "cache-0" if has_directory else None,
                budget_bytes=8 << 30 if has_directory else None,
                memory_bytes=_memory_bytes(model, kind),
                min_tokens=1,
            ),
            draft=DraftConfig(
                model.draft_dir if kind in ("drafted", "drafted, restarts") else "none"
            ),
        )
        servers = Servers(config, _ends_before(kind, num_requests))
        client = Client(servers, model.letter_bias)
        try:
            await flow.run(client, row.size)
        finally:
            await servers.close()
        return client.asked, servers.num_written_bytes


def _memory_bytes(model: Model, kind: Kind | None) -> int:
    if kind == "little memory":
        return LITTLE_STATES * model.state_bytes + LITTLE_ROWS * model.row_bytes
    return 0 if kind is None else MEMORY_BYTES


def _ends_before(kind: Kind | None, num_requests: int) -> Callable[[int], bool]:
    if kind in ("restarts", "drafted, restarts"):
        return lambda index: index > 0
    if kind == "one restart":
        return lambda index: index == num_requests // 2
    return lambda index: False


def _cell(
    row: Row,
    model: Model,
    kind: Kind,
    asked: Sequence[Asked],
    cold: Sequence[Asked],
    written_bytes: int,
) -> Cell:
    rest = asked[1:]
    new_bytes = sum(one.num_new * model.row_bytes + model.state_bytes for one in asked)
    second_bytes = sum(one.returns * model.state_bytes for one in asked)
    flow = FLOWS[row.flow]
    is_counted = flow.is_counted and kind in ("restarts", "one restart")
    cell = Cell(
        row.name,
        kind,
        sum(one.num_cached for one in rest),
        sum(one.num_ideal for one in rest),
        max((one.num_short for one in rest), default=0),
        written_bytes / new_bytes if is_counted else None,
        MAX_WRITTEN + second_bytes / new_bytes,
    )
    limits = flow.max_short_tokens, model.tolerance
    return replace(cell, faults=tuple(faults_of(cell, asked, cold, *limits)))


def faults_of(
    cell: Cell,
    asked: Sequence[Asked],
    cold: Sequence[Asked],
    max_short_tokens: int,
    tolerance: float,
) -> list[str]:
    """Rules that the cell's requests break, given those of a server that keeps nothing."""
    faults = []
    for index, one in enumerate(asked):
        is_told = cell.kind == "little memory" and one.miss_reason is not None
        if index and one.num_short > max_short_tokens and not is_told:
            faults.append(
                f"request {index} is {one.num_short} of {one.num_ideal} tokens short "
                f"({one.miss_reason})"
            )
    if [one.answer for one in asked] != [one.answer for one in cold]:
        faults.append("another text than a server's that keeps nothing")
    elif (off := _off(asked, cold)) > tolerance:
        faults.append(f"log-probabilities differ by {off:.1e}")
    if cell.kind.startswith("drafted") and not any(one.num_rounds for one in asked):
        faults.append("nothing was drafted")
    if cell.written is not None and cell.written > cell.max_written:
        faults.append(f"{cell.written:.2f} of new state is written, not {cell.max_written:.2f}")
    return faults


def _off(asked: Sequence[Asked], cold: Sequence[Asked]) -> float:
    """Largest difference of log-probabilities to a server that keeps nothing."""
    pairs = (
        pair
        for one, other in zip(asked, cold, strict=True)
        for pair in zip(one.logprobs, other.logprobs, strict=True)
    )
    return max((abs(a - b) for a, b in pairs), default=0.0)
