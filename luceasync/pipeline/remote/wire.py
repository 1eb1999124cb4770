"""What a stage's process is told: one message for each verb. It answers those of answers.py.

A command says what crosses with it. Both ends compute that from the message and from sizes of their
own, so that the receiver believes nothing that the sender says of a payload.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from luceasync.ipc.packets import Message, Natural, Positive, WireError
from luceasync.ipc.supervised import CallKind
from luceasync.kv.pages import num_chunks
from luceasync.models.pass_rows import NO_LANE
from luceasync.pipeline.passes import Batch, Passes
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.remote.tensors import Spec, StageSizes

NODES = "nodes"  # the name of the memory that is lent for them


class Command(Message, frozen=True):
    """A verb. `sizes` are the StageSizes or DraftSizes of either end."""

    is_read_in_place: ClassVar[bool] = False  # the receiver reads the payload where it lies

    def check(self, sizes: Any) -> None:
        """Raise WireError for fields that are out of bounds."""

    def payload(self, sizes: Any) -> list[Spec]:
        """The tensors that come with it."""
        return []

    def returns(self, sizes: Any) -> list[Spec]:
        """The tensors that come with the answer, if there is one."""
        return []

    @property
    def call_kind(self) -> CallKind:
        """Which earlier calls tell how long this one may take."""
        return CallKind(type(self).__name__)


class PassCommand(Command, frozen=True):
    """A verb of luceasync.pipeline.passes.Passes that needs nothing else of the receiver."""

    def run(self, passes: Passes, tensors: list[Tensor]) -> list[Tensor] | None:
        """Run it; None: it is not answered."""
        raise NotImplementedError


# --- commands: start ------------------------------------------------------------------------------


class OfferDevices(Command, frozen=True):
    """Describe these devices; `flag` named them. Answered by Offers or Failure."""

    names: tuple[str, ...]
    flag: str


class LoadStage(Command, frozen=True):
    """Load stage `number` of the plan, in which the receiver's devices are those that are here.
    `taps`: layers whose rows are kept; `node_bytes`: of memory for nodes, if none is lent. Answered
    by LoadProgress, then Result or Failure.
    """

    plan: Plan
    number: Natural
    taps: tuple[Natural, ...]
    node_bytes: Positive


# --- commands: passes -----------------------------------------------------------------------------


class TreeParents(Command, frozen=True):
    """The trees of the next verify, int32 [entries, rows]. Beside RunPass, since the payload of
    that may lie in another process's ring.
    """

    num_entries: Positive
    num_rows: Positive

    def payload(self, sizes: StageSizes) -> list[Spec]:
        return [((self.num_entries, self.num_rows), torch.int32)]


class RunPass(Command, frozen=True):
    """Run a pass over a batch, with the input of the first layer. If `answers`, answer with the
    activation, with the logits of a chunk if `project`, or with nothing.
    """

    is_read_in_place: ClassVar[bool] = True

    kind: Literal["prefill", "decode", "verify"]
    lanes: tuple[int, ...]
    begins: tuple[Natural, ...]
    num_rows: Positive
    mark: Positive | None = None
    project: bool = False
    has_parents: bool = False
    answers: bool = True
    scores: bool = False

    @property
    def batch(self) -> Batch:
        """The rows it runs."""
        return Batch(self.lanes, self.begins, self.num_rows, self.mark, self.scores)

    def check(self, sizes: StageSizes) -> None:
        if len(self.lanes) != len(self.begins) or not self.lanes:
            raise WireError(f"{len(self.lanes)} lanes and {len(self.begins)} begins")
        if self.mark is not None and not (self.kind == "prefill" and self.mark < self.num_rows):
            raise WireError(f"a mark after {self.mark} of the {self.num_rows} rows of {self.kind}")
        num_written = 0 if self.kind == "verify" else self.num_rows
        for lane, begin in zip(self.lanes, self.begins, strict=True):
            if lane != NO_LANE:
                sizes.check_lane(lane, begin + num_written)

    def payload(self, sizes: StageSizes) -> list[Spec]:
        return [sizes.input(self.batch)]

    def returns(self, sizes: StageSizes) -> list[Spec]:
        return sizes.output(self.batch, self.project)

    @property
    def call_kind(self) -> CallKind:
        return CallKind(self.kind, len(self.lanes) * self.num_rows)


class PreparePass(Command, frozen=True):
    """This decode or verify comes next, once its input has been computed: do what can be done
    before.
    """

    run: RunPass

    def check(self, sizes: StageSizes) -> None:
        self.run.check(sizes)
        if self.run.kind == "prefill":
            raise WireError("a prefill chunk cannot be prepared")


class RankLogits(Command, frozen=True):
    """Rank the logits of the last pass that left any, of its first entries; see
    luceasync.ranking.logits.RankRequest. Comes with float64: `num_masses` temperatures, then each
    table of `edits`, given as (rows, edits); then int64 rows and int32 words of `num_masked` masks.
    `is_of_masked`: rank these rows alone. Answered by Result, or by BestTokens if none is ranked.
    """

    num_entries: Positive
    num_ranked: Natural
    num_top: Natural | None
    num_masses: Natural
    edits: tuple[tuple[Natural, Natural], ...]
    num_masked: Natural = 0
    is_of_masked: bool = False

    def check(self, sizes: StageSizes) -> None:
        if self.is_of_masked and (not self.num_masked or self.edits):
            raise WireError("masked rows alone, without masks or with edits")

    def payload(self, sizes: StageSizes) -> list[Spec]:
        real = torch.float64
        specs: list[Spec] = [((self.num_masses,), real)] if self.num_masses else []
        specs += [((5, num_edits), real) for _, num_edits in self.edits if num_edits]
        return specs + sizes.masks(self.num_masked)


class ReadRow(Command, frozen=True):
    """Return a whole row: edited or as log-probabilities in `ranking`, counted since the last pass,
    with ids; or raw.
    """

    what: Literal["edited", "logprobs", "raw"]
    index: Natural
    ranking: Natural = 0

    def returns(self, sizes: StageSizes) -> list[Spec]:
        if self.what == "raw":
            return [((sizes.num_vocab,), torch.float32)]
        return [((sizes.num_vocab,), torch.float64)] * 2


class ReadLogprob(Command, frozen=True):
    """Return the log-probability of a token in a row of `ranking`. Answered by Scalar."""

    index: Natural
    token: Natural
    ranking: Natural = 0


class CommitPaths(Command, frozen=True):
    """Commit the rows of paths of these `lengths`, int32, one path after the other."""

    lengths: tuple[Natural, ...]

    def payload(self, sizes: StageSizes) -> list[Spec]:
        return _rows_of(self.lengths)


class ReadTaps(Command, frozen=True):
    """Return the tapped rows of the last pass: those of each entry's path, which come as int32; or
    the first `num_first` of a chunk, if there are no `lengths`. One answer for each layer.
    """

    lengths: tuple[Natural, ...] = ()
    num_first: Natural = 0

    @property
    def num_rows(self) -> int:
        """Rows of one layer."""
        return self.num_first or sum(self.lengths)

    def payload(self, sizes: StageSizes) -> list[Spec]:
        return [] if self.num_first else _rows_of(self.lengths)

    def returns(self, sizes: StageSizes) -> list[Spec]:
        return [sizes.rows(self.num_rows)]

    @property
    def call_kind(self) -> CallKind:
        return CallKind("taps", self.num_rows)


class EmbedTokens(PassCommand, frozen=True):
    """Return the rows of the embedding of the tokens."""

    num_tokens: Positive

    def payload(self, sizes: StageSizes) -> list[Spec]:
        return [((self.num_tokens,), torch.int64)]

    def returns(self, sizes: StageSizes) -> list[Spec]:
        return [sizes.rows(self.num_tokens)]

    def run(self, passes: Passes, tensors: list[Tensor]) -> list[Tensor]:
        return [passes.embed(*tensors)]


class ProposeTokens(PassCommand, frozen=True):
    """Return what the head proposes for a draft's rows behind these anchors: tokens, and the
    parents of a tree of `budget` rows.
    """

    num_entries: Positive
    num_slots: Positive
    budget: Positive | None

    def payload(self, sizes: StageSizes) -> list[Spec]:
        rows = sizes.rows(self.num_entries, self.num_slots)
        return [rows, ((self.num_entries,), torch.int64)]

    def returns(self, sizes: StageSizes) -> list[Spec]:
        if self.budget is None:
            return [((self.num_entries, 1 + self.num_slots), torch.int64)]
        shape = (self.num_entries, 1 + self.budget)
        return [(shape, torch.int64), (shape, torch.int32)]

    def run(self, passes: Passes, tensors: list[Tensor]) -> list[Tensor]:
        rows, anchors = tensors
        proposal = passes.propose_from(rows, anchors, self.budget)
        return [proposal.tokens, *([] if proposal.parents is None else [proposal.parents])]


class RankCandidates(PassCommand, frozen=True):
    """Return so many of the tokens that the head finds best for each of a draft's rows, and their
    logits.
    """

    num_entries: Positive
    num_slots: Positive
    num_candidates: Positive

    def payload(self, sizes: StageSizes) -> list[Spec]:
        return [sizes.rows(self.num_entries, self.num_slots)]

    def returns(self, sizes: StageSizes) -> list[Spec]:
        num_candidates = min(self.num_candidates, sizes.num_vocab)
        shape = (self.num_entries, self.num_slots, num_candidates)
        return [(shape, torch.int64), (shape, torch.float32)]

    def run(self, passes: Passes, tensors: list[Tensor]) -> list[Tensor]:
        [rows] = tensors
        return [*passes.candidates_from(rows, self.num_candidates)]


class PlacePages(Command, frozen=True):
    """Follow the page map: (lane, chunk, page) of each event; page -1: none. `has_more`: the rest
    of the epoch follows.
    """

    epoch: Positive
    events: tuple[tuple[Natural, Natural, int], ...]
    has_more: bool = False

    def check(self, sizes: StageSizes) -> None:
        for lane, chunk, page in self.events:
            sizes.check_lane(lane)
            sizes.check_page(chunk, page)


class RecallPages(PassCommand, frozen=True):
    """Fill pages ahead of the events that place them: (chunk, page) of each."""

    lane: Natural
    places: tuple[tuple[Natural, Natural], ...]

    def check(self, sizes: StageSizes) -> None:
        sizes.check_lane(self.lane)
        for chunk, page in self.places:
            sizes.check_page(chunk, page)

    def run(self, passes: Passes, tensors: list[Tensor]) -> None:
        passes.recall(self.lane, self.places)


class StartProbe(PassCommand, frozen=True):
    """Measure how much attention falls on each chunk of the lane's first tokens."""

    lane: Natural
    num_tokens: Positive

    def check(self, sizes: StageSizes) -> None:
        sizes.check_lane(self.lane, self.num_tokens)

    def run(self, passes: Passes, tensors: list[Tensor]) -> list[Tensor] | None:
        passes.start_probe(self.lane, self.num_tokens)
        return None


class ReadAttentionMass(StartProbe, frozen=True):
    """Return what the lane's last probe has found: float32 [chunks], and float64 seconds."""

    def returns(self, sizes: StageSizes) -> list[Spec]:
        return [((num_chunks(self.num_tokens),), torch.float32), ((1,), torch.float64)]

    def run(self, passes: Passes, tensors: list[Tensor]) -> list[Tensor]:
        mass = passes.attention_mass(self.lane)
        return [mass.of_chunks, torch.tensor([mass.seconds], dtype=torch.float64)]


class ResetLane(PassCommand, frozen=True):
    """Make the lane as if no token had ever run on it."""

    lane: Natural

    def check(self, sizes: StageSizes) -> None:
        sizes.check_lane(self.lane)

    def run(self, passes: Passes, tensors: list[Tensor]) -> None:
        passes.reset(self.lane)


class Synchronize(Command, frozen=True):
    """Answer when all work that was queued is done."""


class CountExperts(Command, frozen=True):
    """Return what became of experts that wait in host memory. Answered by ExpertCounts."""


# --- commands: nodes ------------------------------------------------------------------------------


class SaveNode(Command, frozen=True):
    """Copy what a span left behind in a lane to a node. `regions`: where its tensors go in the lent
    memory, in the order in which shards ask for it; none if no memory was lent. `ticket`: the
    number that completes beside the channel if the copies have not arrived at the answer, NodeRoom;
    without `answers`, it always completes, and a lack of room ends the process.
    """

    node: Natural
    lane: Natural
    begin: Natural
    end: Positive
    with_state: bool
    ticket: Natural
    regions: tuple[Natural, ...] = ()
    answers: bool = True

    def check(self, sizes: StageSizes) -> None:
        _check_span(self.begin, self.end)
        sizes.check_lane(self.lane, self.end)


class RestoreNodes(Command, frozen=True):
    """Fill the lane with the first tokens of a chain of nodes. Answered as SaveNode."""

    lane: Natural
    nodes: tuple[Natural, ...]
    num_tokens: Positive
    ticket: Natural

    def check(self, sizes: StageSizes) -> None:
        sizes.check_lane(self.lane, self.num_tokens)
        if not self.nodes:
            raise WireError("a chain of no nodes is to be restored")


class HoldNode(Command, frozen=True):
    """Read the lane's absent chunks up to `end` from the node, whatever becomes of the node."""

    lane: Natural
    node: Natural
    end: Positive


class DropNode(Command, frozen=True):
    """Forget the node, or the state at its end."""

    node: Natural
    state_only: bool = False


class ExportNode(Command, frozen=True):
    """Return bytes `[begin, begin + num_bytes)` of tensor `index` of a node."""

    node: Natural
    index: Natural
    begin: Natural
    num_bytes: Positive

    def returns(self, sizes: Any) -> list[Spec]:
        return [((self.num_bytes,), torch.uint8)]


class AdoptNode(Command, frozen=True):
    """Hold a node whose bytes are at `regions` of lent memory, or follow. Answered by NodeRoom."""

    node: Natural
    begin: Natural
    end: Positive
    with_state: bool
    regions: tuple[Natural, ...] = ()

    def check(self, sizes: StageSizes) -> None:
        _check_span(self.begin, self.end)


class FillNode(Command, frozen=True):
    """Write bytes `[begin, begin + num_bytes)` of tensor `index` of a node that was adopted."""

    node: Natural
    index: Natural
    begin: Natural
    num_bytes: Positive

    def payload(self, sizes: Any) -> list[Spec]:
        return [((self.num_bytes,), torch.uint8)]


PASS_COMMANDS: tuple[type[PassCommand], ...] = (
    *(
        EmbedTokens,
        ProposeTokens,
        RankCandidates,
        RecallPages,
        StartProbe,
        ReadAttentionMass,
        ResetLane,
    ),
)
COMMANDS: tuple[type[Command], ...] = (
    *(OfferDevices, LoadStage, Synchronize, CountExperts),
    *(TreeParents, RunPass, PreparePass, RankLogits, ReadRow, ReadLogprob, CommitPaths, ReadTaps),
    PlacePages,
    *PASS_COMMANDS,
    *(SaveNode, RestoreNodes, HoldNode, DropNode, ExportNode, AdoptNode, FillNode),
)


def _rows_of(lengths: tuple[int, ...]) -> list[Spec]:
    return [((sum(lengths),), torch.int32)] if sum(lengths) else []


def _check_span(begin: int, end: int) -> None:
    if begin >= end:
        raise WireError(f"a node of tokens [{begin}, {end})")
