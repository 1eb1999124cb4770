"""The target model as the engine sees it: lanes on which tokens run, under any split.

Decides the shape of each pass. Does not know requests, sampling or text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.host_cache.arena import HostMemory, PlainMemory
from luceasync.host_cache.nodes import Nodes, NodesInParts
from luceasync.models.families import family_of
from luceasync.models.files import ModelFiles
from luceasync.models.inference import inference_mode
from luceasync.models.loader import TensorSource
from luceasync.models.pass_rows import NO_LANE
from luceasync.models.spec import ModelSpec
from luceasync.models.trees import ROOT
from luceasync.nodes import NodeKey
from luceasync.pipeline.paged_lanes import paging_of
from luceasync.pipeline.passes import (
    Batch,
    Chain,
    ComingTokens,
    DeviceRounds,
    RoundWork,
    TapRing,
    positions_after_step,
)
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.stage import LocalStage, Stage
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import DraftCandidates, Proposal

# Opens the plan's stage of this number, given a callback for weight bytes read, and the taps.
OpenRemote = Callable[[int, Callable[[int], None], Sequence[int]], Stage]


class LayerSplitBackend:
    """A chain of stages. One device is a chain of one. Synchronous; engine thread only."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        stages: Sequence[Stage],
        page_order: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> None:
        self.plan = plan
        self._taps = tuple(taps)
        self._num_entries = 0  # of the last pass, without padding
        self._tokens = torch.empty(0, 0, dtype=torch.int64)  # rows of the last pass, on any device
        self._decoded = Batch((), (), 1)  # the last decode
        self._verified: Batch | None = None
        self._spec = spec
        self._stages = list(stages)
        self._passes = Chain([stage.passes for stage in stages])
        holders = [nodes for stage in stages for nodes in stage.nodes]
        first_layers = [shard.begin for shard in plan.shards]
        self.lanes = paging_of(
            plan, self._passes, partial(NodesInParts, holders, first_layers), page_order
        )

    @classmethod
    def load(
        cls,
        spec: ModelSpec,
        plan: Plan,
        source: TensorSource,
        advance: Callable[[int], None] = lambda num_bytes: None,
        *,
        taps: Sequence[int] = (),
        memory: HostMemory | None = None,
        open_remote: OpenRemote | None = None,
    ) -> LayerSplitBackend:
        """Load the model as planned. `advance` is called with the bytes of each tensor read;
        `taps`: the layers whose rows drafters may receive; `memory` holds saved nodes;
        `open_remote` opens stages in other processes. Raises ModelError, StageFailed."""
        memory = memory or PlainMemory()
        with torch.inference_mode(), ExitStack() as loaded:
            stages: list[Stage] = []
            for number, (begin, _) in enumerate(plan.stages):
                if plan.devices[begin].is_here:
                    stages.append(LocalStage(spec, plan, source, advance, taps, memory, number))
                else:
                    assert open_remote is not None, "the plan has stages in other processes"
                    stages.append(open_remote(number, advance, taps))
                loaded.callback(stages[-1].close)
            loaded.pop_all()
            return cls(spec, plan, stages, taps=taps)

    @classmethod
    def open(
        cls,
        model: ModelFiles,
        plan: Plan,
        advance: Callable[[int], None] = lambda num_bytes: None,
        *,
        taps: Sequence[int] = (),
        memory: HostMemory | None = None,
        open_remote: OpenRemote | None = None,
    ) -> LayerSplitBackend:
        """Load the model from its files, as `load` does."""
        with model.weights.open() as source:
            return cls.load(
                model.spec, plan, source, advance, taps=taps, memory=memory, open_remote=open_remote
            )

    @property
    def num_shards(self) -> tuple[int, int]:
        """Number of shards in this process and in others."""
        counts = [stage.num_shards for stage in self._stages]
        return sum(local for local, _ in counts), sum(remote for _, remote in counts)

    @property
    def sets_ends_aside(self) -> bool:
        """Whether prefill takes a `mark`; if not, the chunk must end there."""
        return self._spec.sets_ends_aside

    @property
    def nodes(self) -> Nodes:
        """Saved state of lanes by name."""
        return self.lanes.nodes

    @inference_mode
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
        """Run `tokens` at positions `[begin, begin + len(tokens))` of the lane. Until the next pass
        a node that ends there, or at `mark`, can be saved. `scores`: keep the logits of all rows
        for `logits_after`. If `project`, returns logits float32 [vocab] after the last token, which
        ends the prompt. Raises LaneMemoryExhausted; the lane is unchanged then."""
        self._make_room(lane, begin + len(tokens))
        after = None if mark is None else mark - begin
        batch = Batch((lane,), (begin,), len(tokens), after, scores)
        given = torch.tensor([list(tokens)], dtype=torch.int64)
        self._num_entries, self._tokens = 1, given
        logits = self._passes.prefill(batch, given, project=project)
        if project:
            self.lanes.prefilled(lane, begin + len(tokens))
        return None if logits is None else logits[0, 0]

    def logits_after(self, num_tokens: int) -> Logits:
        """Logits of the first `num_tokens` rows of the last prefill. Requires scores=True."""
        return self._passes.logits(num_tokens)

    @inference_mode
    def decode(
        self, lanes: Sequence[int], positions: Sequence[int], tokens: Sequence[int]
    ) -> Logits:
        """Run one token on each lane. Returns logits of [lanes], valid until the next call. Raises
        LaneMemoryExhausted; no lane has changed then."""
        self.lanes.before_steps(lanes, positions, 1)
        for lane, position in zip(lanes, positions, strict=True):
            self._make_room(lane, position + 1)
        missing = self.plan.decode_size(len(lanes)) - len(lanes)
        batch = Batch((*lanes, *[NO_LANE] * missing), (*positions, *[0] * missing), 1)
        self._num_entries, self._decoded = len(lanes), batch
        self._tokens = on_host(tokens, np.int64)[:, None]
        self._passes.decode(batch, (*tokens, *[0] * missing))
        return self._passes.logits(len(lanes))

    @inference_mode
    def run_ahead(self) -> None:
        """Start the next decode step of the last decode's lanes before the engine requests it, each
        with its best token; see Passes. Does nothing if pages would have to move first. Of the last
        logits, only best tokens whose ranking was requested remain valid."""
        lanes, begins = (
            self._decoded.lanes,
            positions_after_step(self._decoded.lanes, self._decoded.begins),
        )
        if max(begins) < self.plan.max_ctx_tokens and self.lanes.have_room(lanes, begins):
            self._passes.run_ahead(Batch(lanes, begins, 1))

    @inference_mode
    def verify(
        self,
        lanes: Sequence[int],
        begins: Sequence[int],
        tokens: Tensor,
        parents: Tensor | None = None,
    ) -> Logits:
        """Run trees of tokens after the `begins` committed tokens of their lanes, without writing
        anything permanent; `commit` then takes paths.

        tokens: int64 [entries, rows], with a number of rows in the plan's `verify_rows`; parents:
        int32 [entries, rows], the row that each row follows, models.trees.ROOT for row 0; None:
        every row follows the one before it. Both on any device. Returns logits of [entries, rows],
        valid until the next call: row r predicts the token after the path to r.
        """
        num_rows = tokens.shape[1]
        assert num_rows in self.plan.verify_rows, f"{num_rows}: {self.plan.verify_rows} are planned"
        self.lanes.before_steps(lanes, begins, num_rows)
        missing = self.plan.verify_size(len(lanes), num_rows) - len(lanes)
        batch = Batch((*lanes, *[NO_LANE] * missing), (*begins, *[0] * missing), num_rows)
        self._num_entries, self._verified, self._tokens = len(lanes), batch, tokens
        if parents is not None and missing:
            parents = F.pad(parents, (0, 0, 0, missing), value=ROOT)
        given = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
        self._passes.verify(batch, given, parents)
        return self._passes.logits(len(lanes))

    @inference_mode
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Append each entry's path of the last `verify` to its lane: rows from row 0 on. An empty
        path keeps nothing and costs nothing.
        """
        batch, self._verified = self._verified, None
        assert batch is not None, "commit follows verify, once"
        for lane, begin, path in zip(batch.lanes, batch.begins, paths, strict=False):
            if path:
                assert path[0] == 0, "a path begins at row 0"
                self._make_room(lane, begin + len(path))
        self._passes.commit([*paths, *[()] * (len(batch.lanes) - len(paths))])

    @property
    def keeps_ends(self) -> bool:
        """Whether a lane is unaffected by tokens that were run after its end."""
        return not self._spec.has_end_state

    @inference_mode
    def device_rounds(self, work: RoundWork, num_lanes: int) -> DeviceRounds | None:
        """Rounds of greedy lanes that need nothing from the host, see Passes.captured_round; None
        if the host is needed because pools move pages."""
        if self.plan.pool is not None:
            return None
        num_entries = self.plan.verify_size(num_lanes, work.num_rows)
        return self._passes.captured_round(work, self._taps, num_entries)

    @inference_mode
    def queue_round(
        self, rounds: DeviceRounds, lanes: Sequence[int], ends: Sequence[int]
    ) -> ComingTokens | None:
        """Queue the next of `rounds` for the lanes with which they were started, where no lane may
        grow beyond its number of `ends` tokens. Returns None, without queueing anything, if that
        would exceed the context."""
        if max(ends) > self.plan.max_ctx_tokens:
            return None
        for lane, end in zip(lanes, ends, strict=True):
            self._make_room(lane, end)
        return rounds.queue()

    @inference_mode
    def send_taps(
        self,
        ring: TapRing,
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
    ) -> None:
        """Give `ring` the rows of `paths` after each tapped layer, at most `num_rows` of an entry,
        from the last decode, or from the last verify once its paths are committed. Raises what the
        ring raises.
        """
        ring.absorb(self._taps_of(paths), lanes, begins, paths, num_rows, self._tokens)

    @inference_mode
    def send_chunk_taps(self, ring: TapRing, lane: int, begin: int, num_tokens: int) -> None:
        """The same for the first `num_tokens` rows of the last prefill."""
        first = max(0, num_tokens - ring.capacity_tokens)
        taps = self._taps_of([range(first, num_tokens)])
        ring.absorb_chunk(taps, lane, begin, num_tokens, self._tokens)

    def _taps_of(self, paths: Sequence[Sequence[int]]) -> list[Tensor]:
        """Rows of each tap, in the order of the taps: [entries, rows, hidden] in the model's dtype,
        on the layer's device. Undefined rows may follow those of a prefill chunk.
        """
        rows, num_entries = self._passes.taps(paths), self._num_entries
        found = [rows[tap] for tap in self._taps]
        return [tap if len(tap) == num_entries else tap[:num_entries] for tap in found]

    @inference_mode
    def embed(self, tokens: Tensor) -> Tensor:
        return self._passes.embed(tokens)

    @inference_mode
    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        return self._passes.propose_from(rows, anchors, budget)

    @inference_mode
    def candidates_from(self, rows: Tensor, num_candidates: int) -> DraftCandidates:
        return self._passes.candidates_from(rows, num_candidates)

    @inference_mode
    def reset(self, lane: int) -> None:
        """Empty the lane."""
        self.lanes.reset(lane)

    def compress(self, tokens: Sequence[int], keep_ratio: float) -> list[int]:
        """A shorter prompt that keeps about `keep_ratio` of the tokens. Raises ValueError for an
        impossible ratio, and Unsupported if the family cannot do this."""
        if not (math.isfinite(keep_ratio) and 0 < keep_ratio <= 1):
            raise ValueError(f"keep_ratio {keep_ratio}: a number above 0 and up to 1 is expected")
        return family_of(self._spec).compress(self._spec, tokens, keep_ratio)

    def expert_counts(self) -> Mapping[str, int]:
        """Counts of experts of all stages, see Stage; empty if all experts are on their devices."""
        sums: Counter[str] = Counter()
        for stage in self._stages:
            sums.update(stage.expert_counts())
        return sums

    def synchronize(self) -> None:
        """Wait until the last device has done all queued work."""
        self._stages[-1].synchronize()

    def raise_if_failed(self) -> None:
        """Raise StageFailed if a stage is known to have failed, without contacting it."""
        for stage in self._stages:
            stage.raise_if_failed()

    def check_alive(self) -> None:
        """Raise StageFailed if a stage does not respond. Call it while nothing runs."""
        for stage in self._stages:
            stage.check_alive()

    def restart_failed(self, lost: Callable[[Sequence[NodeKey]], None]) -> bool:
        """Restart failed stages; returns whether there were any. All lanes must then be reset."""
        # Every stage is restarted: no short circuit.
        return sum(stage.restart_failed(lost) for stage in self._stages) > 0

    def close(self) -> None:
        """Free everything. May be called twice."""
        for stage in self._stages:
            stage.close()
        self._stages.clear()
        self._passes = Chain([])
        self.lanes = paging_of(self.plan, self._passes, partial(NodesInParts, [], []))

    def _make_room(self, lane: int, num_tokens: int) -> None:
        assert num_tokens <= self.plan.max_ctx_tokens, "lanes never exceed the context"
        self.lanes.make_room(lane, num_tokens)
