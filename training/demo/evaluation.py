"""The questions that evaluate the trained model, and when an answer counts as exact.

Owns the two question sets and the rule.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from training.demo import questions, wordings
from training.demo.dialogue import Dialogue

NUM_EXACT_TOKENS = 32
NUM_HELD_OUT = 200
# Turns of the second set: kind, number, and whether an answer about a name precedes them.
DIALOGUE_KINDS = (
    ("name", 20, True),
    ("short", 10, False),
    ("unknown", 20, False),
    ("more", 15, True),
    ("signature", 10, True),
    ("kind", 10, True),
    ("repeat", 5, True),
    ("listing", 5, False),
    ("greeting", 5, False),
)

Entry = dict[str, Any]


def held_out_entries(dialogue: Dialogue, seed: int) -> list[Entry]:
    """Questions about random names, in wordings that training does not use."""
    rng = random.Random(seed)
    names = rng.sample(dialogue.names, min(NUM_HELD_OUT, len(dialogue.names)))
    entries = []
    for i, name in enumerate(names):
        template = wordings.HELD_OUT_TEMPLATES[i % len(wordings.HELD_OUT_TEMPLATES)]
        question = template.replace("{n}", questions.show_name(rng, name))
        entries.append(
            {
                "template": template,
                "name": name,
                "messages": [{"role": "user", "content": question}],
                "answer": dialogue.items[name].answer,
            }
        )
    return entries


def dialogue_entries(dialogue: Dialogue, seed: int) -> list[Entry]:
    """Turns of all kinds, newly drawn in wordings of the training."""
    rng = random.Random(seed)
    entries = []
    for kind, count, follows in DIALOGUE_KINDS:
        for _ in range(count):
            messages, topic, answer = [], None, ""
            if follows:
                question, answer, topic = dialogue.turn(rng, "name", None, "")
                messages += [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ]
            question, answer, _ = dialogue.turn(rng, kind, topic, answer)
            messages.append({"role": "user", "content": question})
            entries.append({"kind": kind, "messages": messages, "answer": answer})
    return entries


def expected_ids(tokenizer: Tokenizer, answer: str) -> list[int]:
    """The tokens that must come first; for a shorter answer, including the end mark."""
    ids = tokenizer.encode(f"{answer}<|im_end|>", add_special_tokens=False).ids
    return ids[:NUM_EXACT_TOKENS]


def write_entries(path: Path, entries: list[Entry]) -> None:
    lines = [json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries]
    path.write_text("".join(lines), encoding="utf-8")


def read_entries(path: Path) -> list[Entry]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
