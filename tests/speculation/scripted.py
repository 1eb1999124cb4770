"""Answers with and without speculation, over a tiny model, and a draft that reads from a script."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from luceasync.engine.acceptance import Acceptance, Decide, matching_child
from luceasync.engine.decoding import anchors_of, choose_next
from luceasync.engine.prepare import PreparedChoice
from luceasync.engine.sampling.row import TokenCounts
from luceasync.engine.sequence import Generation
from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.ranking.local import LocalLogits
from luceasync.ranking.logits import Logits
from luceasync.ranking.proposals import Proposal, Proposer
from luceasync.request import Delta, Sampling
from luceasync.speculation.choice import RoundPlan, RoundShape, StepCosts
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import read_draft_spec
from luceasync.speculation.dflash.features import FeatureRing, FeatureSpec
from luceasync.speculation.dflash.graph import Runner
from luceasync.speculation.dflash.passes import LocalDraft
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.speculator import Speculator
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.engine.choices import make_choice

TAPS = tuple(tiny.DRAFT["dflash_config"]["target_layer_ids"])
BLOCK = tiny.DRAFT["block_size"]
SHAPES = (
    RoundShape(BLOCK, 60),
    RoundShape(BLOCK, 22),
    RoundShape(BLOCK, 8),
    RoundShape(BLOCK),
    RoundShape(4),
    RoundShape(2),
)
VERIFY_ROWS = tuple(shape.num_rows for shape in SHAPES)
MAX_CTX = 512
CPU = torch.device("cpu")


# --- choices --------------------------------------------------------------------------------------


def random_prompt(seed: int, num_tokens: int = 40) -> tuple[int, ...]:
    choice = random.Random(seed)
    return tuple(choice.randrange(4, tiny.VOCAB_SIZE) for _ in range(num_tokens))


def prepare(
    tokenizer: Tokenizer,
    sampling: Sampling,
    *,
    seed: int = 0,
    max_tokens: int = 32,
    stop: tuple[str, ...] = (),
    stop_ids: frozenset[int] = frozenset(),
    top_logprobs: int | None = None,
) -> PreparedChoice:
    prompt = random_prompt(seed)
    return make_choice(
        prompt,
        tokenizer=tokenizer,
        stop=stop,
        stream_id=seed,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        sampling=sampling,
        seed=seed,
        counts=TokenCounts(prompt),
        top_logprobs=top_logprobs,
    )


@dataclass(frozen=True)
class Answer:
    """What came of a choice, however it was cut into deltas."""

    token_ids: tuple[int, ...]
    text: str
    reason: str
    num_tokens: int
    logprobs: tuple

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> Answer:
        *_, last = deltas
        assert last.finish is not None
        return cls(
            tuple(token for delta in deltas for token in delta.token_ids),
            "".join(delta.text for delta in deltas),
            last.finish.reason,
            last.finish.usage.completion_tokens,
            tuple((p.token, round(p.logprob, 3)) for delta in deltas for p in delta.logprobs),
        )


# --- answers ----------------------------------------------------------------------------------


class Lanes:
    """Choices on lanes of a backend, prefilled and with their first token; one after the other, or
    in rounds of speculation together.
    """

    def __init__(
        self,
        backend: LayerSplitBackend,
        prepared: Sequence[PreparedChoice],
        speculator: Speculator | None = None,
    ) -> None:
        self.backend = backend
        self.speculator = speculator
        self.deltas: list[list[Delta]] = [[] for _ in prepared]
        self.running = [self._begin(lane, p) for lane, p in enumerate(prepared)]
        self.running = [g for g in self.running if not self.is_over(g)]

    def _begin(self, lane: int, prepared: PreparedChoice) -> Generation:
        generation = Generation(prepared)
        generation.lane = lane
        prompt = prepared.prompt.ids
        self.backend.reset(lane)
        if self.speculator is not None:
            self.speculator.start(lane)
        for begin in range(0, len(prompt), 32):
            part = prompt[begin : begin + 32]
            logits = self.backend.prefill(lane, begin, part, project=True)
            if self.speculator is not None:
                self.speculator.prefilled(lane, begin, len(part))
        self._choose([generation], LocalLogits(logits[None]))
        return generation

    def _choose(self, generations: Sequence[Generation], logits: Logits) -> None:
        choose_next(generations, logits)
        self.show(generations)

    def show(self, generations: Sequence[Generation]) -> None:
        """Take what they have to show."""
        for generation in generations:
            delta = generation.shown()
            if delta is not None:
                self.deltas[generation.lane].append(delta)

    def is_over(self, generation: Generation) -> bool:
        deltas = self.deltas[generation.lane]
        return bool(deltas) and deltas[-1].finish is not None

    def _leave(self) -> None:
        self.running = [g for g in self.running if not self.is_over(g)]

    def decode(self, generations: Sequence[Generation], plan: RoundPlan | None = None) -> None:
        """A plain step."""
        anchors = anchors_of(generations)
        logits = self.backend.decode(
            [a.lane for a in anchors], [a.position for a in anchors], [a.token for a in anchors]
        )
        if self.speculator is not None:
            self.speculator.decoded(anchors, plan)
        self._choose(generations, logits)
        self._leave()

    def round(
        self, generations: Sequence[Generation], plan: RoundPlan, decide: Decide = matching_child
    ) -> list[list[int]]:
        """A round of speculation; the rows that were committed."""
        anchors = anchors_of(generations)
        paths = self.speculator.round(anchors, plan, Acceptance(generations, decide))
        self.show(generations)
        self._leave()
        return paths

    def answers(self) -> list[Answer]:
        return [Answer.of(deltas) for deltas in self.deltas]


def plain_answers(backend: LayerSplitBackend, prepared: Sequence[PreparedChoice]) -> list[Answer]:
    lanes = Lanes(backend, prepared)
    while lanes.running:
        for generation in list(lanes.running):
            lanes.decode([generation])
    return lanes.answers()


def speculated_answers(
    backend: LayerSplitBackend,
    speculator: Speculator,
    prepared: Sequence[PreparedChoice],
    shape: RoundShape,
) -> list[Answer]:
    lanes = Lanes(backend, prepared, speculator)
    while lanes.running:
        speculating = tuple(g.lane for g in lanes.running)
        lanes.round(list(lanes.running), RoundPlan(shape, speculating, False))
    return lanes.answers()


# --- drafts ---------------------------------------------------------------------------------------


class ScriptedDraft:
    """Proposes what the script holds, and now and then something else; its rows are logits.

    `scripts[lane]`: the lane's tokens by position. `is_wrong(lane, position)`: another token is put
    first there, the script's own comes second.
    """

    device = CPU

    def __init__(
        self,
        scripts: Mapping[int, Sequence[int]],
        is_wrong: Callable[[int, int], bool] = lambda lane, position: False,
    ) -> None:
        self.scripts = scripts
        self.is_wrong = is_wrong
        self._proposer = Proposer()
        self.written: dict[int, list[int]] = {}
        self.valid_from: dict[int, int] = {}

    def propose(self, anchors, lanes, begins, block, *, reach=None) -> Tensor:
        places = zip(lanes.tolist(), begins.tolist(), strict=True)
        return torch.stack([self._logits(lane, begin, block) for lane, begin in places])

    def _logits(self, lane: int, begin: int, block: int) -> Tensor:
        logits = torch.randn(
            block - 1, tiny.VOCAB_SIZE, generator=torch.Generator().manual_seed(begin)
        )
        for slot in range(block - 1):
            position = begin + 1 + slot
            token = (*self.scripts[lane], *[5] * 99)[position]
            logits[slot, token] += 8
            if self.is_wrong(lane, position):
                logits[slot, (token + 1) % tiny.VOCAB_SIZE] += 12
        return logits

    def propose_from(self, rows: Tensor, anchors: Tensor, budget: int | None) -> Proposal:
        return self._proposer(anchors, rows, budget)

    def write_context(self, features, lanes, begins, counts) -> None:
        for lane, begin, count in zip(*map(Tensor.tolist, (lanes, begins, counts)), strict=True):
            self.written.setdefault(lane, []).extend(range(begin, begin + count))

    def set_valid_from(self, lane: int, position: int) -> None:
        self.valid_from[lane] = position


def speculator_of(
    backend: LayerSplitBackend,
    draft,
    head=None,
    run: Runner | None = None,
    costs=None,
    short_rows: Sequence[int] = (),
) -> Speculator:
    spec = FeatureSpec(TAPS, tiny.COMMON["hidden_size"])
    ring = FeatureRing(
        spec, num_lanes=4, capacity_tokens=MAX_CTX, dtype=torch.float32, platform=CpuPlatform()
    )
    head = draft if head is None else head
    passes = LocalDraft(draft, ring, head.propose_from, run=run, short_rows=short_rows)
    return Speculator(backend, [BlockDrafter(passes, SHAPES)], num_lanes=4, costs=costs)


def random_speculator(
    backend: LayerSplitBackend,
    model_dir: Path,
    folder: Path,
    costs: StepCosts | None = None,
    short_rows: Sequence[int] = (),
) -> Speculator:
    """With a real drafter of random weights."""
    draft_dir = tiny.save_draft(folder, tiny.draft_config())
    draft = open_network(
        draft_dir,
        read_draft_spec(draft_dir, read_spec(model_dir)),
        TorchOps(),
        backend.embed,
        num_lanes=4,
        max_ctx_tokens=MAX_CTX,
        dtype=torch.float32,
        device=CPU,
    )
    return speculator_of(backend, draft, backend, costs=costs, short_rows=short_rows)
