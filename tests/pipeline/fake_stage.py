"""A stage that computes nothing: it records its calls, and returns what a test can predict.

Its activation is its input times ten plus its number: 3 through stages 0 and 1 is 301.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from luceasync.host_cache.copy_stream import Ticket
from luceasync.host_cache.nodes import NodeSizes, Span
from luceasync.kv.cache import Shape
from luceasync.kv.pages import PageEvent
from luceasync.nodes import NodeKey
from luceasync.pipeline.passes import AttentionMass, Batch, PassInput, RoundWork
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.transfer import as_rows
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import DraftCandidates, Proposal
from tests.host_cache.late import LateTicket

Calls = list[tuple]  # of all stages, in order: (stage, method, the arguments that matter)


class FakeStage:
    """See luceasync.pipeline.stage.Stage. `fails`: what a verb raises; `tickets`: of all copies,
    none of which arrives by itself.
    """

    def __init__(self, plan: Plan, number: int, calls: Calls) -> None:
        self.number = number
        self.shards = range(*plan.stages[number])
        self.layers = range(plan.shards[self.shards[0]].begin, plan.shards[self.shards[-1]].end)
        self.is_first, self.is_last = number == 0, number == len(plan.stages) - 1
        self.fails: dict[str, Exception] = {}
        self.tickets: list[LateTicket] = []
        self.passes = FakePasses(self, calls)
        self.nodes = [FakeNodes(self, plan, shard, calls) for shard in self.shards]
        self.is_closed = False
        self._calls = calls

    @property
    def num_shards(self) -> tuple[int, int]:
        return 0, len(self.shards)

    def expert_counts(self) -> dict[str, int]:
        return {}

    def synchronize(self) -> None:
        self._calls.append((self.number, "synchronize", None))

    def raise_if_failed(self) -> None:
        self._calls.append((self.number, "raise_if_failed", None))

    def check_alive(self) -> None:
        self._calls.append((self.number, "check_alive", None))

    def restart_failed(self, lost: Callable[[Sequence[NodeKey]], None]) -> bool:
        self._calls.append((self.number, "restart_failed", None))
        return False

    def close(self) -> None:
        self.is_closed = True


class FakePasses:
    """Passes that record their calls."""

    def __init__(self, stage: FakeStage, calls: Calls) -> None:
        self._group = stage
        self._calls = calls

    def prefill(self, batch: Batch, given: Tensor, *, project: bool) -> Tensor | None:
        x = self._run("prefill", batch, given)
        if not self._group.is_last:
            return x
        return x[:, -1:] if project else None

    def decode(self, batch: Batch, given: PassInput) -> Tensor | None:
        x = self._run("decode", batch, as_rows(given))
        if not self._group.is_last:
            return x
        self._logits = x[:, 0]
        return None

    def run_ahead(self, batch: Batch) -> None:
        self._hear("run ahead", (batch.lanes, batch.begins))

    def captured_round(self, work: RoundWork, taps: Sequence[int], num_entries: int) -> None:
        return None

    def verify(self, batch: Batch, given: Tensor, parents: Tensor | None) -> Tensor | None:
        x = self._run("verify", batch, given)
        if not self._group.is_last:
            return x
        self._logits = x
        return None

    def logits(self, num_entries: int) -> Logits:
        return LocalLogits(self._logits[:num_entries])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._hear("commit", [list(path) for path in paths])

    def taps(self, paths: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        return {layer: torch.full((1, 1, 1), float(layer)) for layer in self._group.layers}

    def embed(self, tokens: Tensor) -> Tensor:
        assert self._group.is_first
        return tokens.float()[..., None]

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        assert self._group.is_last
        return Proposal(torch.cat([anchors[:, None], rows[..., 0]], 1), None)

    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates:
        assert self._group.is_last
        ids = rows.long().expand(-1, -1, num_candidates)
        return DraftCandidates(ids, ids.float())

    def place(self, epoch: int, events: Sequence[PageEvent]) -> None:
        self._hear("place", len(events))

    def recall(self, lane: int, places: Sequence[tuple[int, int]]) -> None:
        self._hear("recall", len(places))

    def start_probe(self, lane: int, num_tokens: int) -> None:
        self._hear("start_probe", num_tokens)

    def attention_mass(self, lane: int) -> AttentionMass:
        return AttentionMass(torch.zeros(1), 0.0)

    def reset(self, lane: int) -> None:
        self._hear("reset", lane)

    def _run(self, verb: str, batch: Batch, given: Tensor) -> Tensor:
        self._hear(verb, batch.lanes)
        x = self.embed(given) if self._group.is_first else given
        return x * 10 + self._group.number

    def _hear(self, verb: str, what: object) -> None:
        self._calls.append((self._group.number, verb, what))
        if verb in self._group.fails:
            raise self._group.fails[verb]


class FakeNodes:
    """Nodes with a tensor for each layer and a number for each token."""

    sizes = NodeSizes(token_bytes=4, state_bytes=0)

    def __init__(self, stage: FakeStage, plan: Plan, shard: int, calls: Calls) -> None:
        self.held: dict[str, dict[str, Tensor]] = {}
        self._group = stage
        self._layers = range(plan.shards[shard].begin, plan.shards[shard].end)
        self._shard = shard
        self._calls = calls

    def shapes(self, span: Span) -> dict[str, Shape]:
        shape = ((span.end - span.begin, 1, 1), torch.float32)
        return {f"ls{self._shard}_attn_k.{layer}": shape for layer in self._layers}

    def save(self, lane: int, node: str, span: Span) -> Ticket:
        self._hear("save", node)
        self.held[node] = {n: torch.zeros(shape) for n, (shape, _) in self.shapes(span).items()}
        return self._ticket()

    def restore(self, lane: int, nodes: Sequence[str], num_tokens: int) -> Ticket:
        self._hear("restore", tuple(nodes))
        return self._ticket()

    def span(self, node: str) -> Span:
        num_tokens = len(next(iter(self.held[node].values())))
        return Span(0, num_tokens, with_state=False)

    def hold(self, lane: int, node: str, end: int) -> None:
        self._hear("hold", node)

    def release(self, lane: int) -> None:
        """Nothing to free."""

    def drop(self, node: str, *, state_only: bool = False) -> None:
        self._hear("drop", node)
        self.held.pop(node, None)

    def export(self, node: str) -> dict[str, Tensor]:
        self._hear("export", node)
        return self.held[node]

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        self._hear("adopt", tuple(tensors))
        self.held[node] = dict(tensors)

    def _ticket(self) -> Ticket:
        self._group.tickets.append(LateTicket())
        return self._group.tickets[-1]

    def _hear(self, verb: str, what: object) -> None:
        self._calls.append((self._group.number, verb, what))
        if verb in self._group.fails:
            raise self._group.fails[verb]
