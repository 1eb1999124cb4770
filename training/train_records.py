"""Train a small model that recites JSON records, and its drafter, for measurements.

    python -m training.train_records --out FOLDER [--steps 500] [--draft-steps 300]

Owns the recipe; records are in records/, the rest is that of train_demo and train_draft. Takes some
minutes on 2 cores. FOLDER gets `model` and `draft`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # training takes less time than compilation would

import torch

from training.demo.export import export, train_tokenizer, write_json
from training.demo.network import NetworkConfig
from training.records.kinds import KINDS, NUM_OF_A_KIND, Records, turns_of
from training.train_demo import Recipe, train

CONFIG = NetworkConfig(
    vocab_size=1024,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    attention_interval=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    linear_head_dim=32,
)
RECIPE = Recipe(num_rows=8, row_tokens=256, warmup_steps=40, peak_lr=4e-3, num_workers=1)
DRAFT = "--layers 2 --intermediate 512 --heads 4 --kv-heads 2 --head-dim 32 --taps 0 1 2 3".split()
DRAFT += "--row-tokens 256 --num-rows 16 --num-anchors 16 --warmup-steps 30".split()


def main() -> None:
    args = _arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the worker is forked
    turns = [turns_of(kind, number) for kind in KINDS for number in range(NUM_OF_A_KIND)]
    tokenizer = train_tokenizer((text for turn in turns for _, text in turn), CONFIG.vocab_size)
    config = replace(CONFIG, vocab_size=tokenizer.get_vocab_size())
    recipe = replace(RECIPE, steps=args.steps)
    network, record = train(Records(), tokenizer, config, recipe, torch.device(args.device))
    export(network, tokenizer, args.out / "model")
    write_json(args.out / "model" / "training.json", record)
    lines = [{"messages": [{"role": r, "content": t} for r, t in turn]} for turn in turns]
    data, asked = args.out / "records.jsonl", args.out / "asked.jsonl"
    for path, part in ((data, lines), (asked, lines[:: NUM_OF_A_KIND // 2])):
        path.write_text("".join(json.dumps(line) + "\n" for line in part), encoding="utf-8")
    places = ["--target", args.out / "model", "--data", data, "--eval", asked]
    places += ["--out", args.out / "draft"]
    told = ["--steps", str(args.draft_steps), "--device", args.device, "--checkpoint-s", "1e9"]
    subprocess.run(
        [sys.executable, "-m", "training.train_draft", *places, *told, *DRAFT], check=True
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--steps", type=int, default=500, help="of the model")
    parser.add_argument("--draft-steps", type=int, default=300, help="of the drafter")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
