"""Rounds of one shape, with proposals of the drafter or of a script."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

from luceasync.engine.decoding import SpeculativeDecoding
from luceasync.engine.sequence import Generation
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.speculation.choice import RoundPlan, RoundShape
from luceasync.speculation.dflash.passes import LocalDraft
from luceasync.speculation.drafter import BlockDrafter
from luceasync.speculation.speculator import Speculator

SHARE_WRONG = 0.15  # of a scripted draft's tokens


def forced(shape: RoundShape) -> Callable[[Sequence[int]], RoundPlan]:
    """Rounds of `shape` for all lanes at every step."""
    return lambda lanes: RoundPlan(shape, tuple(lanes), False)


def in_turns(shapes: Sequence[RoundShape], beside: str) -> Callable[[Sequence[int]], RoundPlan]:
    """Rounds of these shapes in turn, in which `beside` proposes for half of the lanes."""
    turns = itertools.count()

    def plan(lanes: Sequence[int]) -> RoundPlan:
        number = next(turns)
        others = dict.fromkeys(lanes[number % 2 :: 2], beside)
        return RoundPlan(shapes[number % len(shapes)], tuple(lanes), False, others=others)

    return plan


class ScriptedDecoding(SpeculativeDecoding):
    """Proposes what plain decoding said, by seed, with mistakes; the drafter's proposals are
    dropped.
    """

    def __init__(
        self,
        backend: LayerSplitBackend,
        speculator: Speculator,
        shape: RoundShape,
        known: Mapping[int, tuple[int, ...]],
        num_lanes: int,
    ) -> None:
        from tests.speculation.scripted import ScriptedDraft

        def is_wrong(lane: int, position: int) -> bool:
            return random.Random(position * 8 + lane).random() < SHARE_WRONG

        self._scripts: dict[int, tuple[int, ...]] = {}
        self._known = known
        self._looks_on = speculator
        script = ScriptedDraft(self._scripts, is_wrong)
        [drafter] = speculator.drafters
        assert isinstance(drafter, BlockDrafter) and isinstance(drafter.passes, LocalDraft)
        passes = LocalDraft(script, drafter.passes.ring, script.propose_from)
        drafters = [BlockDrafter(passes, [shape])]
        super().__init__(backend, Speculator(backend, drafters, num_lanes), force=forced(shape))

    def step(
        self,
        generations: Sequence[Generation],
        *,
        alone: bool,
        meanwhile: Callable[[], None],
    ) -> None:
        for g in generations:
            assert g.lane is not None
            self._scripts[g.lane] = (*g.prepared.prompt.ids, *self._known[g.prepared.seed])
        super().step(generations, alone=alone, meanwhile=meanwhile)
