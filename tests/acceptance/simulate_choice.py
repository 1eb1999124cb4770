"""What choosing a drafter for every round loses to the best fixed one, by kind of text.

    python -m tests.acceptance.simulate_choice [--answers 40] [--kinds prose] [--costs 2:1.39,...]

The code that chooses and copies is the server's own; answers, the drafter's accuracy and the time
of each step (--costs, see bench_mtp) are given. Exits with 1 if more is lost than allowed.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import random
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from luceasync.bench.edits import FUNCTION, KINDS, MODULES, functions
from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.cyext.copies import CopyIndex
from luceasync.pipeline.transfer import on_host
from luceasync.ranking.proposals import Proposal
from luceasync.speculation.choice import RoundPlan, RoundShape, StepCosts
from luceasync.speculation.drafter import Anchor, BlockDrafter, LiveText
from luceasync.speculation.lookup import LOOKUP, LookupDrafter, lookup_shapes
from luceasync.speculation.speculator import Speculator
from luceasync.text.tokenizer import Tokenizer

MOST_TOKENS = 400  # of an answer
WRONG = -1  # no token
Text = tuple[list[int], list[int]]  # a prompt and its answer


@dataclass(frozen=True)
class Costs:
    """Plain steps that a verify pass of so many rows takes, and drafting one token. `most_lost`:
    the share that may be lost; where rows cost much, what few of them have shown decides.
    """

    name: str
    verify: Callable[[int], float]
    drafted: float
    most_lost: float

    def of(self, shape: RoundShape | None) -> float:
        """Of a step of one lane."""
        if shape is None:
            return 1.0
        num_drafted = 0 if shape.drafter == LOOKUP else shape.block - 1
        return self.verify(shape.num_rows) + self.drafted * num_drafted


ON_CPU = {2: 1.4, 3: 1.8, 4: 2.1, 8: 3.4, 16: 5.3, 32: 8.9}  # measured: docs/results/speculation.md
COSTS = (
    Costs("27B on a GPU", lambda num_rows: 1 + 0.029 * (num_rows - 1), 0.03, 0.03),
    Costs("0.5B on a CPU", ON_CPU.__getitem__, 0.08, 0.05),
)


@dataclass(frozen=True)
class Drafters:
    """Which drafters there are. `right`: how often each slot of the model drafter is right if those
    before it are; none: there is only lookup.
    """

    name: str
    right: tuple[float, ...]


DRAFTERS = (
    Drafters("lookup", ()),
    Drafters("lookup, mtp", (0.87, 0.85, 0.83)),
    Drafters("lookup, a weak mtp", (0.45, 0.4, 0.35)),
)


class KnownAnswers:
    """A target whose answers are known, and a drafter that is right by chance."""

    off_reason = None
    num_unsettled = 0
    capacity_tokens = 1 << 30

    def __init__(self, right: Sequence[float], seed: int = 0) -> None:
        self._right = right
        self._random = random.Random(seed)
        self.ids: list[int] = []  # of prompt and answer

    def propose(
        self, tokens: Sequence[int], lanes: Sequence[int], begins: Sequence[int], shape: RoundShape
    ) -> Proposal:
        [begin], row = begins, [*tokens]
        for slot in range(shape.block - 1):
            place = begin + 1 + slot
            is_right = place < len(self.ids) and self._random.random() < self._right[slot]
            row.append(self.ids[place] if is_right else WRONG)
        return Proposal(on_host([row], int), None)

    def verify(self, lanes, begins, tokens, parents=None) -> Any:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **fields: None  # nothing else is asked for a result


class KnownPath:
    """An Acceptor that follows the answer."""

    arrived_at = 0.0

    def __init__(self, known: KnownAnswers, begin: int) -> None:
        self._after = known.ids[begin + 1 :]

    def fit(self, proposal: Proposal, most_rows: int) -> Proposal:
        return proposal

    def __call__(self, proposal: Proposal, logits: Any) -> list[list[int]]:
        rows = proposal.tokens[0, 1:].tolist()
        pairs = zip(rows, self._after[:-1], strict=False)  # the last token is never run
        num_right = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if num_right is None:
            num_right = min(len(rows), max(0, len(self._after) - 1))
        return [[*range(1 + num_right)]]


Force = Callable[[bool], RoundShape | None]  # given whether there is something to copy


def time_of(texts: Sequence[Text], drafters: Drafters, costs: Costs, force: Force | None) -> float:
    """Plain steps' worth of time for all answers."""
    known = KnownAnswers(drafters.right)
    bodies: list[Any] = [LookupDrafter(lookup_shapes(), 1)]
    if drafters.right:
        blocks = range(len(drafters.right) + 1, 1, -1)
        bodies.insert(0, BlockDrafter(known, [RoundShape(b, None, "mtp") for b in blocks]))
    measured = StepCosts()
    shapes = [shape for body in bodies for shape in body.shapes]
    for shape in (None, *shapes):
        for _ in range(8):
            measured.observe(1, shape, costs.of(shape))
    speculator, total = Speculator(known, bodies, 1, measured), 0.0
    for prompt, answer in texts:
        known.ids = [*prompt, *answer]
        text = LiveText(array("i", prompt), CopyIndex())
        speculator.start(0)
        text.ids.append(answer[0])
        while len(text.ids) < len(known.ids):
            place = len(text.ids) - 1
            anchor = Anchor(0, place, text.ids[-1], text)
            promises = speculator.promises([anchor])
            if force is None:
                plan = speculator.plan([0], alone=False, promises=promises)
            else:
                shape = force(bool(promises[0]))
                plan = RoundPlan(shape, () if shape is None else (0,), False)
            num_tokens = 1
            if plan.speculating:
                [path] = speculator.round([anchor], plan, KnownPath(known, place))
                num_tokens = len(path)
            else:
                speculator.decoded([anchor], plan)
            total += costs.of(plan.shape if plan.speculating else None)
            text.ids.extend(known.ids[place + 1 : place + 1 + num_tokens])
    return total


def fixed(drafters: Drafters) -> dict[str, Force]:
    """Always the same: no speculation, rounds of a shape, or copies where there are any and else
    rounds of the model drafter.
    """
    found: dict[str, Force] = {"plain": lambda copies: None}
    drafted = [RoundShape(b, None, "mtp") for b in range(2, len(drafters.right) + 2)]
    for shape in drafted:
        found[f"mtp {shape.block}"] = lambda copies, shape=shape: shape
    for shape in lookup_shapes():
        for other in (None, *drafted):
            name = f"lookup {shape.block}" + (f", else mtp {other.block}" if other else "")
            found[name] = lambda copies, shape=shape, other=other: shape if copies else other
    return found


# --- texts ----------------------------------------------------------------------------------------


def edited(source: str, name: str, parameter: str, number: int) -> str:
    """The function with one change."""
    if number % 3 == 0:
        return re.sub(rf"\b{name}\b", f"new_{name}", source)
    if number % 3 == 1:
        first, _, rest = source.partition(":\n")
        return f'{first}:\n    """Do what {name} is for."""\n{rest}'
    return re.sub(rf"\b{parameter}\b", f"the_{parameter}", source)


def replacement(old: str, new: str) -> str:
    """Blocks of whole lines and of those that replace them."""
    before, after, blocks = old.splitlines(), new.splitlines(), []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            first, last = max(0, a - 1), min(len(before), b + 1)
            lines = [*before[first:a], *after[c:d], *before[b:last]]
            blocks += ["<<<<<<< SEARCH", *before[first:last], "=======", *lines, ">>>>>>> REPLACE"]
    return "\n".join(blocks)


def texts_of(kind: str, num: int, tokenizer: Tokenizer) -> list[Text]:
    """Prompts and answers of this kind."""
    pairs = []
    if kind == "prose":
        modules = [inspect.getdoc(importlib.import_module(name)) or "" for name in MODULES]
        long = [words for words in modules if len(words) > 600]
        pairs = [("Explain this module.", words) for words in long]
    for number, (source, name, parameter) in enumerate(functions(num)):
        new = edited(source, name, parameter, number)
        diff = difflib.unified_diff(source.splitlines(True), new.splitlines(True), "a.py", "b.py")
        answers = {
            "whole rewrite": f"```python\n{new}```",
            "search and replace": replacement(source, new),
            "unified diff": "".join(diff),
        }
        if kind in answers:
            pairs.append((FUNCTION.format(source=source, task="Change it."), answers[kind]))
        elif kind == "new code":
            pairs.append((f"Write a function {name} in Python.", f"```python\n{source}```"))
    encoded = ((tokenizer.encode(a), tokenizer.encode(b)[:MOST_TOKENS]) for a, b in pairs[:num])
    return [(prompt, answer) for prompt, answer in encoded if len(answer) > 1]


def measured(text: str) -> Costs:
    """Costs as bench_mtp prints them; the nearest number of rows stands in for others."""
    found = dict(part.split(":") for part in text.split(","))
    drafted = float(found.pop("drafted"))
    steps = {int(rows): float(taken) for rows, taken in found.items()}

    def verify(num_rows: int) -> float:
        return steps[min(steps, key=lambda rows: (abs(rows - num_rows), -rows))]

    return Costs("measured", verify, drafted, 0.03)


def simulate_long(costs: Costs) -> int:
    """Print the speed, beside plain decoding, of answers behind 100,000 tokens that repeat nothing,
    with a drafter whose rounds would give 1.3 tokens, and one that is never right; and of answers
    of four letters, whose copies are right by chance. Returns the exit status.
    """
    choice, is_fine = random.Random(3), True

    def texts_of(num_ids: int, prompt_ids: int) -> list[Text]:
        return [
            (
                [*map(choice.randrange, [prompt_ids] * 100_000)],
                [*map(choice.randrange, [num_ids] * n)],
            )
            for n in (1000, 1000, 1000, 300, 300)
        ]

    letters = texts_of(4, 64)
    for name, texts, right, least in (
        ("repeating nothing", texts_of(150_000, 150_000), (0.25, 0.2, 0.2), 0.99),
        ("repeating nothing", texts_of(150_000, 150_000), (0.0, 0.0, 0.0), 0.99),
        ("of four letters", letters, (), 0.98),
        ("of four letters", letters, (0.25, 0.25, 0.25), 0.98),
    ):
        num_tokens = sum(len(answer) - 1 for _, answer in texts)
        speed = num_tokens / time_of(texts, Drafters("", right), costs, None)
        print(f"{costs.name}, {name}, drafts right {right}: {speed:.3f} times plain")
        is_fine = is_fine and speed >= least
    return 0 if is_fine else 1


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--answers", type=int, default=40, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--costs", type=measured, help="those of one lane")
    parser.add_argument("--long", action="store_true", help="texts that repeat nothing, at 100K")
    options = parser.parse_args()
    if options.long:
        sys.exit(simulate_long(options.costs or COSTS[0]))
    tokenizer, is_fine = Tokenizer.load(BUNDLED_MODEL_DIR), True
    columns = "costs", "drafters", "answers", "tokens", "chosen", "best fixed", "", "lost"
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for kind in options.kinds.split(","):
        texts = texts_of(kind, options.answers, tokenizer)
        num_tokens = sum(len(answer) - 1 for _, answer in texts)
        for costs in [options.costs] if options.costs else COSTS:
            for drafters in DRAFTERS:
                chosen = time_of(texts, drafters, costs, None)
                times = {
                    name: time_of(texts, drafters, costs, force)
                    for name, force in fixed(drafters).items()
                }
                best = min(times, key=lambda name: times[name])
                regret = chosen / times[best] - 1
                is_fine = is_fine and regret <= costs.most_lost
                speeds = (f"{num_tokens / each:.2f}" for each in (chosen, times[best]))
                row = (costs.name, drafters.name, kind, num_tokens, *speeds, best, f"{regret:.1%}")
                print(f"| {' | '.join(map(str, row))} |", flush=True)
    sys.exit(0 if is_fine else 1)


if __name__ == "__main__":
    main()
