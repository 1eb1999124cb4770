"""What is said between this process and a backend's: one message for each verb of a stage.

Owns their fields. Tensors go beside them; the module tensors says how large these are.
"""

from __future__ import annotations

from typing import Literal

from luceasync.ipc.packets import Message, Natural, Positive
from luceasync.pipeline.offer import Offer
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.plan import Plan

NODES = "nodes"  # the name of the memory that is lent for them
PIECE_BYTES = 4 << 20  # of a node that is streamed


# --- what a backend is told ----------------------------------------------------------------------


class Ask(Message, frozen=True):
    """What do these devices of yours offer? `flag` has named them."""

    names: tuple[str, ...]
    flag: str


class Load(Message, frozen=True):
    """Load stage `number` of the plan, in which your own devices are those that are here. `taps`:
    see LocalStage; `node_bytes`: of memory for nodes, where none is lent.
    """

    plan: Plan
    number: Natural
    taps: tuple[Natural, ...]
    node_bytes: Positive


class Parents(Message, frozen=True):
    """With int32 [entries, rows]: the trees of the next verify."""

    num_entries: Positive
    num_rows: Positive


class Run(Message, frozen=True):
    """Run a pass over a batch, with what the first of your layers is given. `answers`: say that it
    is done, with the activation or, of a chunk with `project`, with the logits.
    """

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
        return Batch(self.lanes, self.begins, self.num_rows, self.mark, self.scores)


class Soon(Message, frozen=True):
    """This decode or verify comes next, once what it is given has been computed: do what can be
    done before. `Given` begins it.
    """

    run: Run


class Given(Message, frozen=True):
    """Run the pass that was announced, with what the first of your layers is given."""


class Rank(Message, frozen=True):
    """What is wanted of the logits of the last pass that left any, of its first entries; see
    luceasync.ranking.logits.Wanted. Where none is ranked, `Best` answers. With float64:
    `num_masses` temperatures, then each table of `edits`, (rows, edits). Then, where there are
    masks, int64 rows and int32 words of `num_masked`; `is_of_masked`: of these rows alone.
    """

    num_entries: Positive
    num_ranked: Natural
    num_top: Natural | None
    num_masses: Natural
    edits: tuple[tuple[Natural, Natural], ...]
    num_masked: Natural = 0
    is_of_masked: bool = False


class Whole(Message, frozen=True):
    """A row: edited or as log-probabilities in `ranking`, counted since the last pass; or raw."""

    what: Literal["edited", "logprobs", "raw"]
    index: Natural
    ranking: Natural = 0


class Logprob(Message, frozen=True):
    """The log-probability of a token in a row of what was ranked; see Whole."""

    index: Natural
    token: Natural
    ranking: Natural = 0


class Commit(Message, frozen=True):
    """See Passes.commit; every path is part of the payload, int32, after their `lengths`."""

    lengths: tuple[Natural, ...]


class Taps(Message, frozen=True):
    """The tapped rows of the last pass: of each entry those of its path, int32 in the payload; or,
    where no lengths are named, the first `num_first` of a chunk. An answer for each layer.
    """

    lengths: tuple[Natural, ...] = ()
    num_first: Natural = 0


class Embed(Message, frozen=True):
    """See Passes.embed, with the tokens."""

    num_tokens: Positive


class Propose(Message, frozen=True):
    """See Passes.propose_from, with rows and anchors."""

    num_entries: Positive
    num_slots: Positive
    budget: Positive | None


class Place(Message, frozen=True):
    """See Passes.place: (lane, chunk, page) of each event; page -1: none. `has_more`: the rest of
    the epoch follows.
    """

    epoch: Positive
    events: tuple[tuple[Natural, Natural, int], ...]
    has_more: bool = False


class Recall(Message, frozen=True):
    """See Passes.recall: chunk and page of each place."""

    lane: Natural
    places: tuple[tuple[Natural, Natural], ...]


class Look(Message, frozen=True):
    """See Passes.look."""

    lane: Natural
    num_tokens: Positive


class Masses(Message, frozen=True):
    """What the lane's last look has found: float32 of its chunks, and float64 seconds."""

    lane: Natural


class Reset(Message, frozen=True):
    """See Passes.reset."""

    lane: Natural


class Save(Message, frozen=True):
    """See Nodes.save. `regions`: where it goes in the memory that was lent, in the order in which
    shards ask for it; none where none was. `ticket`: the number under which it is told, beside the
    channel, that copies have arrived which the answer says have not.
    """

    node: Natural
    lane: Natural
    begin: Natural
    end: Positive
    with_state: bool
    ticket: Natural
    regions: tuple[Natural, ...] = ()


class Restore(Message, frozen=True):
    """See Nodes.restore, and Save."""

    lane: Natural
    nodes: tuple[Natural, ...]
    num_tokens: Positive
    ticket: Natural


class Hold(Message, frozen=True):
    """See Nodes.hold."""

    lane: Natural
    node: Natural
    end: Positive


class Drop(Message, frozen=True):
    """See Nodes.drop."""

    node: Natural
    state_only: bool


class Export(Message, frozen=True):
    """A piece of tensor `index` of a node."""

    node: Natural
    index: Natural
    begin: Natural
    num_bytes: Positive


class Adopt(Message, frozen=True):
    """Hold a node whose bytes lie at `regions` of the memory that was lent, or follow."""

    node: Natural
    begin: Natural
    end: Positive
    with_state: bool
    regions: tuple[Natural, ...] = ()


class Fill(Message, frozen=True):
    """A piece of tensor `index` of a node that was adopted, with its bytes."""

    node: Natural
    index: Natural
    begin: Natural
    num_bytes: Positive


class Synchronize(Message, frozen=True):
    """See Stage.synchronize."""


ORDERS: tuple[type[Message], ...] = (
    *(Ask, Load, Parents, Run, Soon, Given, Rank, Whole, Logprob, Commit, Taps, Embed, Propose),
    *(Place, Reset, Recall, Look, Masses, Save, Restore, Hold, Drop, Export, Adopt, Fill),
    Synchronize,
)


# --- what it says --------------------------------------------------------------------------------


class Offered(Message, frozen=True):
    """What the devices offer, in the order in which they were named."""

    offers: tuple[Offer, ...]


class Failed(Message, frozen=True):
    """What was asked for cannot be had: the words for the user."""

    words: str


class Read(Message, frozen=True):
    """So many bytes more of the weights are read."""

    num_bytes: Natural


class Done(Message, frozen=True):
    """It is done; with what it gives, if it gives anything."""


class Best(Message, frozen=True):
    """The best token of each row that was to be ranked."""

    tokens: tuple[Natural, ...]


class Told(Message, frozen=True):
    """A number that was asked for."""

    value: float


class Room(Message, frozen=True):
    """Whether there was memory for a node, and whether all copies have arrived; else that is told
    later.
    """

    is_there: bool
    have_arrived: bool = True


ANSWERS: tuple[type[Message], ...] = (Offered, Failed, Read, Done, Best, Told, Room)
