"""Pumps over a target that counts instead of computing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from luceasync.engine.decoding import PlainDecoding
from luceasync.engine.pump import Pump
from luceasync.host_cache.copy_stream import DoneTicket, Ticket
from luceasync.host_cache.nodes import NodeSizes, Span
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_orders import NoDisk
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_cache.memory import MemoryNodes, UnreadFeatures
from luceasync.ranking.local import LocalLogits
from luceasync.text.tokenizer import Tokenizer
from tests.whole_lanes import PagelessLanes

VOCAB_SIZE = 8


class CountingTarget:
    """Always predicts token + 1; writes down what it was asked."""

    sizes = NodeSizes(token_bytes=1, state_bytes=1)
    sets_ends_aside = True

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.run_ahead_after: list[tuple] = []  # which of these
        self.restores: dict[int, Ticket] = {}  # by lane: what is not there at once

    def prefill(
        self,
        lane: int,
        begin: int,
        tokens: Sequence[int],
        *,
        project: bool,
        mark: int | None = None,
        scores: bool = False,
    ) -> Tensor | None:
        self.calls.append(("prefill", lane, begin, len(tokens)))
        return self._logits(tokens[-1:])[0] if project else None

    def decode(self, lanes: Sequence[int], positions: Sequence[int], tokens: Sequence[int]):
        self.calls.append(("decode", tuple(lanes), tuple(positions)))
        return LocalLogits(self._logits(tokens))

    def run_ahead(self) -> None:
        self.run_ahead_after.append(self.calls[-1])

    def reset(self, lane: int) -> None:
        self.calls.append(("reset", lane))

    def save(self, lane: int, node: str, span: Span) -> Ticket:
        self.calls.append(("save", lane, span.begin, span.end))
        return DoneTicket()

    def restore(self, lane: int, nodes: Sequence[str], num_tokens: int) -> Ticket:
        self.calls.append(("restore", lane, num_tokens))
        return self.restores.get(lane, DoneTicket())

    def drop(self, node: str, *, state_only: bool = False) -> None:
        pass

    def export(self, node: str) -> dict[str, Tensor]:
        return {}

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        pass

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        following = torch.tensor([(token + 1) % VOCAB_SIZE for token in tokens])
        return torch.nn.functional.one_hot(following, VOCAB_SIZE).float()


def letters() -> Tokenizer:
    """A token for each of the first letters."""
    vocab = {chr(ord("a") + i): i for i in range(VOCAB_SIZE)}
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    backend = Backend(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend.to_str())


def make_pump(
    target: CountingTarget,
    num_lanes: int = 2,
    memory_bytes: int = 0,
    *,
    recurrent: bool = False,
    **options,
) -> Pump:
    """Without memory nothing is cached, so that the calls of the target are few."""
    lanes = options.setdefault("lanes", PagelessLanes())
    mover = MemoryNodes(target, UnreadFeatures(), VOCAB_SIZE, lanes)
    limits = Limits(memory_bytes)
    prefixes = PrefixCache(mover, NoDisk(), limits, recurrent=recurrent, chunk_tokens=64)
    decoding = options.pop("decoding", None) or PlainDecoding(target)
    pump = Pump(target, decoding, prefixes, num_lanes=num_lanes, chunk_tokens=64, **options)
    pump.listen(lambda command: command(pump))
    return pump


def run(pump: Pump, max_steps: int = 100) -> list:
    emitted = []
    for _ in range(max_steps):
        if pump.is_idle:
            return emitted
        emitted += pump.step()
    raise AssertionError("the pump does not come to rest")
