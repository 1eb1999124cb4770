"""Questions to a model, and the rows of the table that says whether speculation changed any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luceasync.request import Finish

Kind = Literal["plain", "penalties", "stop strings"]
Origin = Literal["cold", "memory", "disk", "disk, other split"]
KINDS: tuple[Kind, ...] = ("plain", "penalties", "stop strings")


@dataclass(frozen=True)
class Target:
    """A model with its drafter, and a first and a second message of each conversation.
    `is_scripted`: the right tokens are proposed, with mistakes at random places. `drafters`: whose
    rounds are forced, by name; of several in turn, and of the last one for half of the lanes.
    """

    name: str
    model_dir: Path
    draft_dir: Path | Literal["mtp", "lookup"]
    block: int
    questions: tuple[tuple[str, str], ...]
    max_tokens: int
    logit_bias: Mapping[int, float]
    is_scripted: bool = False
    drafters: tuple[str, ...] = ("dflash",)

    @property
    def cases(self) -> tuple[Case, ...]:
        """The rows of its table; trees are DFlash's."""
        return CASES if self.drafters == ("dflash",) else CHAINS


@dataclass(frozen=True)
class Case:
    """A row of the table. Unless it is cold, a second turn continues a kept conversation."""

    budget: int | None  # None: the chain
    origin: Origin = "cold"
    kind: Kind = "plain"
    num_shards: int = 1
    num_lanes: int = 1

    @property
    def proposal(self) -> str:
        return "chain" if self.budget is None else f"tree of {self.budget}"

    @property
    def is_restarted(self) -> bool:
        return self.origin.startswith("disk")

    @property
    def num_turns(self) -> int:
        return 1 if self.origin == "cold" else 2


@dataclass(frozen=True)
class Answer:
    """One turn of one conversation."""

    ids: tuple[int, ...]
    text: str
    finish: Finish


Answers = dict[tuple[int, int], Answer]  # by conversation and turn

# Every two values of different columns meet in a row. The first four are the plainest.
CASES = (
    Case(None),
    Case(8),
    Case(22),
    Case(60),
    Case(None, "memory", "penalties", 3, 4),
    Case(8, "memory", "stop strings", 1, 4),
    Case(22, "memory", "plain", 3, 1),
    Case(60, "memory", "penalties", 1, 1),
    Case(None, "disk", "stop strings", 3, 1),
    Case(8, "disk", "penalties", 3, 1),
    Case(22, "disk", "penalties", 1, 4),
    Case(60, "disk", "plain", 3, 4),
    Case(None, "disk, other split", "plain", 1, 4),
    Case(8, "disk, other split", "plain", 3, 4),
    Case(22, "disk, other split", "stop strings", 3, 4),
    Case(60, "disk, other split", "stop strings", 1, 1),
    Case(None, "cold", "penalties", 3, 4),
    Case(60, "cold", "stop strings", 3, 4),
    Case(22, "disk, other split", "penalties", 1, 1),
)
# Those of drafters without trees: the first four are the plainest here too.
CHAINS = (
    Case(None),
    Case(None, num_lanes=4),
    Case(None, num_shards=3),
    Case(None, num_shards=3, num_lanes=4),
    *(case for case in CASES[4:] if case.budget is None),
    Case(None, "memory", "plain", 1, 1),
    Case(None, "memory", "stop strings", 3, 1),
    Case(None, "disk", "penalties", 1, 4),
    Case(None, "cold", "stop strings", 1, 4),
)
