"""What masks take: to make them on the host, and to apply them beside the logits.

    python -m scripts.bench_masks [--tokenizer DIR] [--vocab 151936,248320] [--device cuda:0]

DIR: a folder with tokenizer.json, whose tokens an answer is made of; without it only the second
table is made. A vocabulary that has fewer tokens than asked for gets pairs of its words.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from luceasync.engine.sampling.choose import rank
from luceasync.engine.sampling.row import RowSampling
from luceasync.grammar.compiler import Compiler, GrammarVocabulary
from luceasync.grammar.guide import Guide
from luceasync.grammar.program import compose
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.shard_passes import bodies_for
from luceasync.ranking.local import LocalLogits
from luceasync.request import Constraint, Sampling
from luceasync.text.tokenizer import Tokenizer
from training.records.kinds import KINDS, record_of, schema_of

NUM_ROWS = 16  # of a proposal
EVERY = 8  # tokens a proposal is made and looked at
ROUND = 12  # tokens that a round says


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--vocab", default="151936,248320")
    parser.add_argument("--device", default="cpu:0")
    options = parser.parse_args()
    sizes = [int(size) for size in options.vocab.split(",")]
    if options.tokenizer is not None:
        told = "token that has come", "allowed?", "mask", "16 rows fitted", "16 rows masked"
        told += f"a round of {ROUND} tokens", "caught up with"
        print(f"us of CPU time\n| vocabulary | {' | '.join(told)} |\n{'|---' * (len(told) + 1)}|")
        for size in sizes:
            print(f"| {size} | {' | '.join(host_us(options.tokenizer, size))} |", flush=True)
    print("us until the tokens are on the host\n| vocabulary | rows | T | free | masked |")
    print("|---|---|---|---|---|")
    for size in sizes:
        for num_rows in (1, NUM_ROWS, 4 * NUM_ROWS):
            for temperature in (0.0, 1.0):
                free, masked = device_us(size, num_rows, temperature, options.device)
                told = f"{size} | {num_rows} | {temperature:g} | {free:.0f} | {masked:.0f}"
                print(f"| {told} |", flush=True)


def host_us(folder: Path, num_vocab: int) -> list[str]:
    """Medians and maxima over records of each kind, each walked twice."""
    definition = enlarged((folder / "tokenizer.json").read_text(encoding="utf-8"), num_vocab)
    tokenizer = Tokenizer(definition, Tokenizer.load(folder).eos_ids)
    compiler = Compiler(GrammarVocabulary(tokenizer, num_vocab))
    spent: list[list[float]] = [[] for _ in range(7)]
    for kind in KINDS:
        schema = Constraint("json_schema", json.dumps(schema_of(kind)), "schema")
        matcher = compiler._compile(compose(schema))
        for number in range(2):
            text = json.dumps(record_of(kind, number), ensure_ascii=False)
            ids = tokenizer.encode(text, special=False)
            _walk(Guide(matcher.copy(), None, -(-num_vocab // 32)), ids, spent[:5])
            _rounds(Guide(matcher.copy(), None, -(-num_vocab // 32)), ids, spent[5:])
    return [f"{np.median(one):.0f} (most {max(one):.0f})" for one in spent]


def _walk(guide: Guide, ids: Sequence[int], spent: Sequence[list[float]]) -> None:
    come, allowed, mask, fitted, masked = spent
    for at, token in enumerate(ids):
        if at % EVERY == 0 and at + NUM_ROWS <= len(ids):
            rows = [0, *ids[at : at + NUM_ROWS - 1]]
            fitted.append(_cpu_us(lambda rows=rows: guide.fit(rows, None, NUM_ROWS)))
            masked.append(_cpu_us(lambda rows=rows: guide.masks(rows, None)))
        allowed.append(_cpu_us(lambda token=token: guide.allows(token)))
        mask.append(_cpu_us(guide.mask))
        come.append(_cpu_us(lambda token=token: guide.consume(token)))


def _rounds(guide: Guide, ids: Sequence[int], spent: Sequence[list[float]]) -> None:
    """Of each round: when its tokens are known, and while devices work on the next one."""
    said_in, caught_up_in = spent
    for at in range(0, len(ids) - ROUND, ROUND):
        said = [*ids[at : at + ROUND]]
        said_in.append(_cpu_us(lambda said=said: _say(guide, said)))
        caught_up_in.append(_cpu_us(guide.catch_up))


def _say(guide: Guide, said: list[int]) -> None:
    assert guide.foresee(said, is_missed=True)
    for token in said:
        guide.consume(token)


def _cpu_us(do: Callable[[], object]) -> float:
    started = time.thread_time_ns()
    do()
    return (time.thread_time_ns() - started) / 1e3


def enlarged(definition: str, num_vocab: int) -> str:
    """A tokenizer.json with as many tokens, to which pairs of its words are added."""
    told = json.loads(definition)
    vocab = told["model"]["vocab"]
    words = sorted(word for word in vocab if word.isalpha() and word.isascii() and len(word) > 3)
    rng = random.Random(0)
    free = iter(range(max(vocab.values()) + len(told["added_tokens"]) + 1, num_vocab))
    while (number := next(free, None)) is not None:
        vocab.setdefault(rng.choice(words) + rng.choice(words), number)
    return json.dumps(told)


@torch.inference_mode()
def device_us(num_vocab: int, num_rows: int, temperature: float, device: str) -> tuple[float, ...]:
    """Medians without masks and with one on every row, in turns."""
    platform = open_platform(device)
    rows = torch.randn(num_rows, num_vocab, device=platform.device)
    logits = LocalLogits(rows, bodies_for(platform))
    sampling = Sampling(temperature=temperature)
    free = [RowSampling(sampling, 1, i) for i in range(num_rows)]
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (num_rows, -(-num_vocab // 32)))
    pairs = zip(free, words.astype(np.int32), strict=True)
    masked = [replace(row, mask=mask) for row, mask in pairs]
    spent: tuple[list[float], list[float]] = ([], [])
    for number in range(12):
        for sampled, found in zip((free, masked), spent, strict=True):
            started = time.perf_counter()
            rank(logits, sampled)
            if number > 1:
                found.append((time.perf_counter() - started) * 1e6)
    return float(np.median(spent[0])), float(np.median(spent[1]))


if __name__ == "__main__":
    main()
