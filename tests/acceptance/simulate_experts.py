"""What speculation loses to the best fixed way where experts wait in host memory: a round costs its
rows and the experts that its rows miss.

    python -m tests.acceptance.simulate_experts [--answers 20] [--shares 0.25,0.5]

The code that chooses is the server's own; what rows choose, how often a drafter is right and what
bytes take is stated. Exit status 1 if a drafter that does not pay loses more than it may.
"""

from __future__ import annotations

import argparse
import random
import sys
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.cyext.copies import CopyIndex
from luceasync.speculation.choice import RoundPlan, RoundShape, StepCosts
from luceasync.speculation.drafter import Anchor, BlockDrafter, LiveText
from luceasync.speculation.speculator import Speculator
from tests.acceptance.simulate_choice import KnownAnswers, KnownPath

NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 256, 8, 40
SIMULATED_LAYERS = 8  # that stand for all
ANSWER_TOKENS = 400
MOST_LOST = 0.03  # to plain steps, where these are the best
BLOCKS = (4, 3, 2)
# Seconds: a step but for its experts, what a further row adds, a drafted token; an expert from the
# device's memory at 4.2 TB/s, and from the host's at 55 GB/s.
STEP_S, ROW_S, DRAFTED_S = 1.9e-3, 0.06e-3, 0.06e-3
EXPERT_BYTES = 1.77e6
HIT_S, MISS_S = EXPERT_BYTES / 4.2e12, EXPERT_BYTES / 55e9

Row = tuple[tuple[int, ...], ...]  # the experts of each layer


@dataclass(frozen=True)
class Case:
    """A share of the experts in slots, the share of a row's experts that the row before has chosen
    too, and how often each slot of the drafter is right if those before it are.
    """

    slots: float
    reuse: float
    right: tuple[float, ...]


def next_row(row: Row, reuse: float, source: random.Random) -> Row:
    """The experts of a row after another."""
    layers = []
    for before in row:
        kept = [expert for expert in before if source.random() < reuse]
        others = [e for e in source.sample(range(NUM_EXPERTS), 2 * NUM_CHOSEN) if e not in kept]
        layers.append(tuple((kept + others)[:NUM_CHOSEN]))
    return tuple(layers)


def trace(num_tokens: int, reuse: float, source: random.Random) -> list[Row]:
    """What the rows of an answer choose."""
    rows = [tuple(tuple(range(NUM_CHOSEN)) for _ in range(SIMULATED_LAYERS))]
    while len(rows) < num_tokens:
        rows.append(next_row(rows[-1], reuse, source))
    return rows


class Slots:
    """Experts in the slots of a layer, the least recently used first."""

    def __init__(self, num_slots: int) -> None:
        self._experts: OrderedDict[int, None] = OrderedDict()
        self._num_slots = num_slots

    def take(self, experts: set[int]) -> int:
        """A pass with these experts: how many were in no slot."""
        hits = [expert for expert in experts if expert in self._experts]
        for expert in hits:
            self._experts.move_to_end(expert)
        misses = sorted(experts.difference(hits))
        for expert in misses[: self._num_slots - len(hits)]:
            if len(self._experts) == self._num_slots:
                self._experts.popitem(last=False)
            self._experts[expert] = None
        return len(misses)


class SlottedTarget(KnownAnswers):
    """A target whose steps take what their experts take."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.right)
        self._case = case
        self._source = random.Random(1)
        num_slots = max(NUM_CHOSEN, int(case.slots * NUM_EXPERTS))
        self._slots = [Slots(num_slots) for _ in range(SIMULATED_LAYERS)]
        self.rows: Sequence[Row] = ()
        self.step_s = 0.0  # of the last one

    def run(self, rows: Sequence[Row], drafted: int = 0) -> float:
        """The seconds of a pass over these rows."""
        met = missed = 0
        for layer, slots in enumerate(self._slots):
            experts = {expert for row in rows for expert in row[layer]}
            met, missed = met + len(experts), missed + slots.take(experts)
        rows_s = ROW_S * (len(rows) - 1) + DRAFTED_S * drafted
        experts_s = (HIT_S * met + MISS_S * missed) * NUM_LAYERS / SIMULATED_LAYERS
        self.step_s = STEP_S + rows_s + experts_s
        return self.step_s

    def verify(self, lanes, begins, tokens, parents=None) -> Any:
        """Rows that are wrong choose what no row of the answer does."""
        [begin], [ids] = begins, tokens.tolist()
        rows: list[Row] = []
        is_right = True
        for place, token in enumerate(ids, begin):
            is_right = is_right and place < len(self.ids) and token == self.ids[place]
            own = self.rows[place] if is_right else None
            rows.append(own or next_row(rows[-1], self._case.reuse, self._source))
        self.run(rows, drafted=len(ids) - 1)


class TimedCosts(StepCosts):
    """StepCosts by the target's clock."""

    def __init__(self, target: SlottedTarget) -> None:
        super().__init__()
        self._target = target

    def observe(self, num_lanes: int, shape: RoundShape | None, seconds: float) -> None:
        super().observe(num_lanes, shape, self._target.step_s)


def time_of(case: Case, num_answers: int, fixed: RoundShape | str | None) -> float:
    """Seconds of all answers. `fixed`: "chosen", or always rounds of a shape or plain steps."""
    target, source, total = SlottedTarget(case), random.Random(2), 0.0
    drafter = BlockDrafter(target, [RoundShape(block, None, "mtp") for block in BLOCKS])
    speculator = Speculator(target, [drafter], 1, TimedCosts(target))
    for _ in range(num_answers):
        target.ids = [source.randrange(1 << 17) for _ in range(ANSWER_TOKENS)]
        target.rows = trace(ANSWER_TOKENS, case.reuse, source)
        speculator.start(0)
        text = LiveText(array("i", target.ids[:1]), CopyIndex())
        while len(text.ids) < ANSWER_TOKENS:
            place = len(text.ids) - 1
            anchor = Anchor(0, place, text.ids[-1], text)
            if isinstance(fixed, str):
                plan = speculator.plan([0], alone=True, promises=speculator.promises([anchor]))
            else:
                plan = RoundPlan(fixed, () if fixed is None else (0,), False)
            num_tokens = 1
            if plan.speculating:
                [path] = speculator.round([anchor], plan, KnownPath(target, place))
                num_tokens = len(path)
            else:
                target.run([target.rows[place]])
                speculator.decoded([anchor], plan)
                speculator.timed(1, plan, target.step_s)
            total += target.step_s
            text.ids.extend(target.ids[place + 1 : place + 1 + num_tokens])
    return total


def lost(case: Case, num_answers: int) -> tuple[float, float, str, float]:
    """Tokens per second as chosen, of the best fixed way, its name, and what was lost to it."""
    ways: dict[str, RoundShape | None] = {"plain": None}
    ways |= {f"rounds of {block}": RoundShape(block, None, "mtp") for block in BLOCKS}
    times = {name: time_of(case, num_answers, way) for name, way in ways.items()}
    best, chosen = min(times, key=lambda name: times[name]), time_of(case, num_answers, "chosen")
    num_tokens = num_answers * (ANSWER_TOKENS - 1)
    return num_tokens / chosen, num_tokens / times[best], best, chosen / times[best] - 1


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=20)
    parser.add_argument("--shares", default="0.1,0.25,0.5,1.0", help="of the experts, in slots")
    options = parser.parse_args()
    is_fine = True
    columns = "in slots", "reuse", "right", "chosen", "best fixed", "", "lost"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for share in map(float, options.shares.split(",")):
        for reuse in (0.3, 0.7):
            for right in ((0.87, 0.85, 0.83), (0.6, 0.55, 0.5), (0.3, 0.25, 0.2)):
                chosen, fixed, best, regret = lost(Case(share, reuse, right), options.answers)
                is_fine = is_fine and (best != "plain" or regret <= MOST_LOST)
                row = f"{share:.0%}", reuse, right[0], f"{chosen:.0f}", f"{fixed:.0f}", best
                print(f"| {' | '.join(map(str, row))} | {regret:.1%} |", flush=True)
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
