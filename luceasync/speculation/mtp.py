"""Drafting with the head that a model brings (multi-token prediction, MTP): what it needs, and its
passes.

A body of speculation.drafter.DraftPasses in this process. Its rows are in no node: after a restore
the head sees what comes from there on.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.config import Config
from luceasync.models.files import ModelFiles
from luceasync.models.pass_rows import round_up_rows
from luceasync.models.precision import Precision
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.capacity import DraftFootprint
from luceasync.pipeline.devices import default_device, find_devices
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.passes import RoundWork
from luceasync.pipeline.platform import Platform
from luceasync.pipeline.transfer import Transfer, direct, on_host
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash.draft_config import drafts_with_mtp
from luceasync.speculation.dflash.features import check_rows
from luceasync.speculation.dflash.graph import EagerRunner, Runner
from luceasync.speculation.drafter import DraftInRounds
from luceasync.speculation.mtp_network import (
    HEAD_ROWS,
    OTHER_ROWS,
    RING_TOKENS,
    DraftVocabulary,
    MtpNetwork,
    context_spec,
    head_name,
)

HOST = torch.device("cpu")
NAME = "mtp"
BLOCK = 4  # rows of its largest rounds: three drafted tokens
NOWHERE = -1  # no text goes on there
LATE_TOKENS = 16  # of plain steps in a row, which are taken up at once


@dataclass(frozen=True, slots=True)
class MtpPlacement:
    """A head to draft with, and where it runs. `shapes`: of its rounds, largest first;
    `weight_bytes`: of its layer as it is stored, and of the `head_rows` rows of the model's head
    that it has for itself; 0: it takes the model's, whole.
    """

    spec: ModelSpec
    device: Offer
    shapes: tuple[RoundShape, ...]
    weight_bytes: int
    head_rows: int = 0

    @property
    def taps(self) -> tuple[int, ...]:
        """The model's layers that it reads."""
        return context_spec(self.spec).taps

    @property
    def verify_rows(self) -> tuple[int, ...]:
        """The numbers of rows of its proposals."""
        return tuple(shape.num_rows for shape in self.shapes)

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.spec.mtp_shapes().values()))

    def footprint(self, precision: Precision) -> DraftFootprint:
        """Its bytes beside the model; a lane's do not grow with its context."""
        num_rows = 1 + LATE_TOKENS + (OTHER_ROWS if self.head_rows else 0)  # of hidden numbers
        numbers = (RING_TOKENS + 2) * 2 * context_spec(self.spec).attention.kv_dim
        numbers += num_rows * self.spec.hidden_size
        return DraftFootprint(self.device, self.weight_bytes, 0, numbers * precision.weight_bytes)


def mtp_of(
    config: Config, model: ModelFiles, devices: Sequence[Offer], precision: Precision
) -> MtpPlacement | None:
    """The head that the config drafts with; None: another drafter, or none. It runs where the
    model's last layers of this process do. Raises ConfigError.
    """
    if not drafts_with_mtp(config, model):
        return None
    here = [device for device in devices if device.is_here]
    [device] = here[-1:] or find_devices([default_device()], "--draft mtp")
    block, spec = config.draft.block or BLOCK, model.spec
    blocks = sorted({block, -(-block // 2), 3, 2} & {*range(2, block + 1)}, reverse=True)
    shapes, head_rows = spec.mtp_shapes(), HEAD_ROWS if spec.vocab_size > HEAD_ROWS else 0
    if head_rows:
        shapes[head_name(spec)] = (head_rows, spec.hidden_size)
    sizes = (
        model.weights.encoding(name).num_bytes(shape, precision) for name, shape in shapes.items()
    )
    rounds = tuple(RoundShape(b, None, NAME) for b in blocks)
    return MtpPlacement(spec, device, rounds, sum(sizes), head_rows)


class MtpPasses:
    """DraftPasses of an MtpNetwork. Engine thread only."""

    off_reason = None  # it lives as long as this process

    def __init__(
        self,
        network: MtpNetwork,
        num_lanes: int,
        transfer: Transfer = direct,
        run: Runner | None = None,
        short_rows: Sequence[int] = (),
        platform: Platform | None = None,
        vocabulary: DraftVocabulary | None = None,
        *,
        is_beside: bool = False,
    ) -> None:
        """`run`: how passes are run, None: operation by operation. `short_rows`: sizes to which
        short prefill chunks are padded; their rows are absorbed as a round's are. `platform`: the
        network's, None: that of the host. `vocabulary`: the network's, None: it takes the model's.
        `is_beside`: the whole model is on the network's device.
        """
        self.network = network
        self._transfer = transfer
        self._run = run or EagerRunner()
        self._short_rows = sorted(short_rows)
        self._platform = platform
        self._vocabulary = vocabulary
        self._is_beside = is_beside
        self._parts: dict[tuple[RoundShape, int | None], DraftInRounds] = {}
        self._ends = [0] * num_lanes  # of what was absorbed; NOWHERE: of more than the text has
        # Plain steps that are still to be taken up, all of the same lanes.
        shape = num_lanes, LATE_TOKENS, network.pending.shape[1]
        self._late_rows = torch.zeros(shape, dtype=network.dtype, device=network.device)
        self._late_tokens = np.zeros(shape[:2], dtype=np.int64)
        self._late_lanes: list[int] = []
        self._num_late = 0
        for lane in range(num_lanes):
            network.restart(lane, 0)

    @property
    def num_unsettled(self) -> int:
        return self._run.num_unsettled

    @property
    def capacity_tokens(self) -> int:
        return self.network.capacity_tokens

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: RoundShape
    ) -> Proposal:
        """See DraftPasses. The proposal is on the head's device."""
        self._take_up_late()
        self._go_on(lanes, begins)
        num_tokens = shape.block - 1
        reach = self.network.reach_for(max(begins) + num_tokens)

        def work(index: Tensor) -> Tensor:
            anchors, lanes, begins = self._here(index)
            return self.network.propose(anchors, lanes, begins, num_tokens, reach=reach)

        with self._on_device():
            index = on_host([tokens, lanes, begins], np.int64)
            return Proposal(self._run((shape, reach), work, index), None)

    def absorb(
        self,
        taps: Sequence[Tensor],
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        tokens: Tensor,
    ) -> None:
        [tap] = taps
        check_rows(len(self._ends), len(tap), tap.shape[1], lanes, begins, paths)
        if num_rows == 1 and all(map(len, paths)) and tokens.device == HOST:
            self._absorb_late(tap, lanes, begins, tokens)
            return
        self._take_up_late()
        self._go_on(lanes, begins)
        with self._on_device():
            here = self._transfer(tap, self.network.device)
            self._run_absorb(here, lanes, begins, paths, num_rows, tokens)
        for lane, begin, path in zip(lanes, begins, paths, strict=True):
            self._ends[lane] = begin + len(path)

    def _absorb_late(
        self, tap: Tensor, lanes: Sequence[int], begins: Sequence[int], tokens: Tensor
    ) -> None:
        """Keep a row of each lane until rounds want it, or there are many: while the head rests a
        step then waits for a copy and not for a pass.
        """
        if [*lanes] != self._late_lanes or self._num_late == LATE_TOKENS:
            self._take_up_late()
        self._go_on(lanes, begins)
        self._late_lanes = [*lanes]
        with self._on_device():
            here = self._transfer(tap, self.network.device)
            self._late_rows[: len(lanes), self._num_late] = here[:, 0]
        self._late_tokens[: len(lanes), self._num_late] = tokens[:, 0]
        self._num_late += 1
        for lane, begin in zip(lanes, begins, strict=True):
            self._ends[lane] = begin + 1

    def _take_up_late(self) -> None:
        """Absorb the rows of plain steps that were kept."""
        count, lanes = self._num_late, self._late_lanes
        if not count:
            return
        self._num_late = 0
        rows, tokens = self._late_rows[: len(lanes)], self._late_tokens[: len(lanes)]
        begins = [self._ends[lane] - count for lane in lanes]
        with self._on_device():
            index = rows, lanes, begins, [range(count)] * len(lanes), LATE_TOKENS
            self._run_absorb(*index, torch.from_numpy(tokens.copy()))

    def _run_absorb(
        self,
        rows: Tensor,
        lanes: Sequence[int],
        begins: Sequence[int],
        paths: Sequence[Sequence[int]],
        num_rows: int,
        tokens: Tensor,
    ) -> None:
        padded = [[*path, *[0] * (num_rows - len(path))] for path in paths]
        index = on_host([*lanes, *begins, *map(len, paths), *chain(*padded)], np.int64)
        key = ("absorb", tokens.device)  # a captured pass takes them from one device
        self._run(key, self._absorb, index, tokens, rows)

    def absorb_chunk(
        self, taps: Sequence[Tensor], lane: int, begin: int, num_tokens: int, tokens: Tensor
    ) -> None:
        [tap] = taps
        num_rows = tap.shape[1]
        self._take_up_late()
        if begin != self._ends[lane]:
            self.reset(lane, begin)
        if self._vocabulary is not None:
            self._vocabulary.add(lane, tokens[0].tolist())
        if num_rows in self._short_rows:
            tokens = F.pad(tokens, (0, num_rows - num_tokens))
            self.absorb(taps, [lane], [begin], [range(num_tokens)], num_rows, tokens)
            return
        first = max(0, num_tokens - self.capacity_tokens)
        if first:
            self.network.restart(lane, begin + first)
        count = num_tokens - first
        missing = round_up_rows(count, per_octave=4) - count  # kernels are compiled for few sizes
        with self._on_device():
            rows = self._transfer(tap[:, first:num_tokens], self.network.device)
            index = on_host([lane, begin + first, count, *range(count), *[0] * missing], np.int64)
            self._absorb(index, self._here(tokens[:, first:]), rows)
        self._ends[lane] = begin + num_tokens

    def _absorb(self, index: Tensor, tokens: Tensor, tap: Tensor) -> None:
        """index: int64 [(3 + rows) * entries]: lanes, begins, counts, and the rows of the paths."""
        num_entries = len(tap)
        index = self._here(index)
        lanes, begins, counts = index[: 3 * num_entries].view(3, -1)
        paths = index[3 * num_entries :].view(num_entries, -1)
        self.network.absorb(tap, self._here(tokens), lanes, begins, counts, paths)

    def warm_up(self, shapes: Sequence[RoundShape], num_rows: Sequence[int]) -> None:
        """Run every pass of one lane, with padding alone; `num_rows`: of all rounds that may come.
        After NUM_WARM_UPS times no request waits for kernels to be compiled or a graph to be
        captured.
        """
        device, width = self.network.device, self.network.pending.shape[1]
        for shape in shapes:
            self.propose([0], [-1], [0], shape)
        here = {(shape.num_rows, device) for shape in shapes}
        for count, where in here | {(n, HOST) for n in (LATE_TOKENS, *num_rows, *self._short_rows)}:
            index = on_host([-1, *[0] * (2 + count)], np.int64)
            tokens = torch.zeros(1, count, dtype=torch.int64, device=where)
            with self._on_device():
                rows = self.network.pending.new_zeros(1, count, width)
                self._run(("absorb", where), self._absorb, index, tokens, rows)

    def reset(self, lane: int, begin: int = 0) -> None:
        if lane >= 0:
            self._take_up_late()
            self._ends[lane] = begin
            self.network.restart(lane, begin)
            if self._vocabulary is not None:
                self._vocabulary.begin(lane)

    def _go_on(self, lanes: Sequence[int], begins: Sequence[int]) -> None:
        """Restart lanes that do not go on at their end."""
        for lane, begin in zip(lanes, begins, strict=True):
            if lane >= 0 and self._ends[lane] != begin:
                self.reset(lane, begin)

    def in_rounds(self, shape: RoundShape, end: int) -> DraftInRounds | None:
        if not self._is_beside:
            return None
        key = shape, self.network.reach_for(end)
        if key not in self._parts:
            self._parts[key] = self._part(*key)
        return self._parts[key]

    def _part(self, shape: RoundShape, reach: int | None) -> DraftInRounds:
        network = self.network

        def propose(anchors: Tensor, lanes: Tensor, begins: Tensor) -> Tensor:
            lanes, begins = lanes.long(), begins.long()  # kernels are compiled for these
            return network.propose(anchors, lanes, begins, shape.block - 1, reach=reach)

        def absorb(
            taps: Sequence[Tensor],
            proposed: Tensor,
            lanes: Tensor,
            begins: Tensor,
            counts: Tensor,
            rows: Tensor,
        ) -> None:
            [tap] = taps
            places = lanes.long(), begins.long(), counts.long()
            network.absorb(tap, proposed, *places, rows.long())

        work = RoundWork(shape.block, propose, absorb)
        return DraftInRounds(work, self._begin_rounds, self._kept)

    def _begin_rounds(self, lanes: Sequence[int], begins: Sequence[int]) -> None:
        """See DraftInRounds."""
        self._take_up_late()
        self._go_on(lanes, begins)

    def _kept(self, lane: int, begin: int, num_tokens: int, end: int) -> None:
        """See DraftInRounds. The state of a token that does not stand leads nowhere: a lane that
        goes on after less is restarted.
        """
        kept = begin + num_tokens
        self._ends[lane] = kept if kept == end else NOWHERE

    def refresh(self) -> None:
        """Do nothing: it lives as long as this process."""

    def check_alive(self) -> None:
        """Do nothing: it lives as long as this process."""

    def _here(self, index: Tensor) -> Tensor:
        return index.to(self.network.device, non_blocking=True)

    def _on_device(self) -> AbstractContextManager[object]:
        """Launch kernels on the network's device inside it."""
        return nullcontext() if self._platform is None else self._platform.on_device()
