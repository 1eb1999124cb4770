"""Write texts in the recall model's language for train_draft, one JSON line each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from training.recall.facts import LANGUAGES, SLOT_WORDS, Writer

ASKED_SHARE = 0.5  # of the slots
SLOTS_PER_FACT = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="file that is written")
    parser.add_argument("--form", choices=LANGUAGES, default="full")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of each")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    language, num_slots = LANGUAGES[args.form], args.tokens // SLOT_WORDS
    writer, words = Writer(language, args.seed), language.words
    num_facts, num_questions = num_slots // SLOTS_PER_FACT, int(ASKED_SHARE * num_slots)
    with args.out.open("w", encoding="utf-8") as file:
        for row in writer.rows(args.texts, args.tokens, num_facts, num_questions).tolist():
            text = " ".join(words[token] for token in row)
            file.write(json.dumps({"text": text}) + "\n")


if __name__ == "__main__":
    main()
