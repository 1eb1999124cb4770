"""Schemas to ask for, by kind: made up, or those of JSONSchemaBench."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.acceptance.grammar.schemas import kind_of, schema_of

MOST_BYTES = 200_000  # of a schema: a server takes no larger ones


@dataclass(frozen=True, slots=True)
class Case:
    """One schema. `name` is unique; tables count by `kind`."""

    name: str
    kind: str
    schema: Any


def made_up(seeds: Sequence[int]) -> list[Case]:
    """Random schemas, by their outermost part."""
    return [Case(f"number {seed}", kind_of(seed), schema_of(seed)) for seed in seeds]


def of_bench(folder: Path, num_of_a_kind: int, seed: int) -> list[Case]:
    """Random schemas of each data set of JSONSchemaBench (Geng et al. 2025), which has a folder for
    each below `folder`, with a file for each schema.
    """
    rng = random.Random(seed)
    cases = []
    for data_set in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(data_set.glob("*.json"))
        for file in rng.sample(files, min(num_of_a_kind, len(files))):
            schema = json.loads(file.read_text(encoding="utf-8"))
            if len(json.dumps(schema)) <= MOST_BYTES:
                cases.append(Case(f"{data_set.name}/{file.stem}", data_set.name, schema))
    return cases
