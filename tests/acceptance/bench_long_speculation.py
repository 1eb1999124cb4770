"""Speculation behind a long context where it hardly pays, and the first token after a restore.

    python -m tests.acceptance.bench_long_speculation [--context 100000] [--shape NAME]
        [--device cpu:0] [--dtype fp32] [--tokens 400] [--rounds 7] [--letters 4]

A model of random weights draws each token from a few letters: with four, rounds give 1.3 tokens.
Engines without speculation, with lookup, with MTP, and with both take turns.
"""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # as the command line does, before torch

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from luceasync.bench.device import open_report
from luceasync.bench.engines import (
    EngineSetup,
    ask,
    wait_until_written,
    write_random_model,
)
from luceasync.bench.report import Report, figure, interleave, median, ms, paired_ratio
from luceasync.bench.restore import STATES, prepare
from luceasync.bench.shapes import SHAPES, SMALL
from luceasync.config import Config, DraftConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import Request, Sampling, TokenPrompt
from luceasync.speculation.dflash import load
from luceasync.speculation.mtp_network import MtpNetwork

TINY = SMALL["qwen3_5"] | {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
FIRST_LETTER = 100  # ids that answers are made of
NUM_PROMPT_IDS = 64  # of which prompts are made, with those letters
ROOM_TOKENS = 2048
PLAIN, COPIED, HEAD, BOTH = "plain", "lookup", "head", "head and lookup"
WAYS = {
    PLAIN: DraftConfig("none"),
    COPIED: DraftConfig("lookup"),
    HEAD: DraftConfig("mtp", lookup="off"),
    BOTH: DraftConfig("mtp", lookup="on"),
}


def stubbed_head(num_letters: int) -> type[MtpNetwork]:
    """A head that does all its work, and then drafts one of the letters as if drawn."""

    class StubbedHead(MtpNetwork):
        def __init__(self, *given, **named) -> None:
            super().__init__(*given, **named)
            choose = self._choose

            def drawn(hidden: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
                token = choose(hidden, lanes)
                number = (hidden[:, 0].float().sum(-1).abs() * 1e4).long() + token
                return FIRST_LETTER + number % num_letters

            self._choose = drawn

    return StubbedHead


@dataclass(frozen=True)
class Said:
    """Of an answer: seconds of a token after the first one, by the clock and of this process."""

    token_s: float
    cpu_s: float
    tau: float
    ids: tuple[int, ...]


async def answer(engine: LocalEngine, prompt: TokenPrompt, num_tokens: int, **sampled) -> Said:
    request = Request(prompt, sampling=Sampling(**sampled), max_tokens=num_tokens, ignore_eos=True)
    ids: list[int] = []
    begun_s = cpu_s = 0.0
    async for delta in await engine.open(request):
        if not ids:
            begun_s, cpu_s = time.perf_counter(), time.process_time()
            num_before = len(delta.token_ids)
        ids += delta.token_ids
        finish = delta.finish
    seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    assert finish is not None
    accepted = finish.speculation.accepted if finish.speculation else 0
    count = len(ids) - num_before
    return Said(seconds / count, cpu_s / count, len(ids) / (len(ids) - accepted), tuple(ids))


async def bench_answers(
    report: Report,
    configs: Mapping[str, Config],
    prompt: TokenPrompt,
    *,
    num_letters: int,
    num_tokens: int,
    rounds: int,
) -> None:
    letters = {FIRST_LETTER + number: 100.0 for number in range(num_letters)}
    said: dict[str, list[Said]] = {way: [] for way in configs}
    async with AsyncExitStack() as opened:
        engines = {}
        for way, config in configs.items():
            engines[way] = await opened.enter_async_context(build_engine(config))
            await engines[way].load()
        for seed in range(rounds + 1):
            for way in list(engines)[:: 1 if seed % 2 else -1]:
                drawn = {"temperature": 1.0, "seed": seed, "logit_bias": letters}
                found = await answer(engines[way], prompt, num_tokens, **drawn)
                if seed:  # the first one takes up the prompt
                    said[way].append(found)
    columns = ("speculation", "tau", "ms a token", "speed beside plain", "CPU ms", "the same of it")
    table = report.table(
        (*columns, "equal answers"),
        f"{len(prompt.ids)} tokens before, {num_tokens} in an answer, {num_letters} letters",
    )
    for way, found in said.items():
        clock, cpu = (
            [[s.token_s for s in of] for of in (found, said[PLAIN])],
            [[s.cpu_s for s in of] for of in (found, said[PLAIN])],
        )
        num_equal = sum(a.ids == b.ids for a, b in zip(found, said[PLAIN], strict=True))
        table.add(
            way,
            figure(median([s.tau for s in found])),
            ms(median(clock[0]), 2),
            figure(paired_ratio(clock[1], clock[0]), digits=3),
            ms(median(cpu[0]), 2),
            figure(paired_ratio(cpu[1], cpu[0]), digits=3),
            f"{num_equal} of {len(found)}",
        )


def bench_first_tokens(
    report: Report,
    setup: EngineSetup,
    configs: Mapping[str, Config],
    prompt: TokenPrompt,
    *,
    rounds: int,
) -> None:
    """Each sample is a new engine that knows the files alone."""

    async def keep() -> None:
        async with build_engine(configs[PLAIN]) as engine:
            await engine.load()
            await ask(engine, prompt, 2)
            await wait_until_written(engine)

    async def restart(way: str) -> tuple[float, float]:
        async with build_engine(configs[way]) as engine:
            await engine.load()
            prepare(setup.files, STATES[0])
            answered = await ask(engine, prompt, 2)
        usage = answered.finish.usage
        return answered.first_s, usage.cached_tokens / usage.prompt_tokens

    asyncio.run(keep())
    samples = interleave(
        {way: (lambda way=way: asyncio.run(restart(way))) for way in configs}, rounds
    )
    table = report.table(
        ("speculation", "first token", "beside without", "restored"),
        f"{len(prompt.ids)} tokens, restored by a new engine",
    )
    plain = [first_s for first_s, _ in samples[PLAIN]]
    for way, found in samples.items():
        seconds = [first_s for first_s, _ in found]
        restored = median([part for _, part in found])
        ratio = figure(paired_ratio(seconds, plain), digits=3)
        table.add(way, ms(median(seconds)), ratio, f"{restored:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--shape", choices=SHAPES, help="of Qwen3.5's; default: a tiny one")
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--letters", type=int, default=4)
    parser.add_argument("--parts", default="answers,restores")
    given = parser.parse_args()
    shape = dict(SHAPES[given.shape] if given.shape else TINY) | {"mtp_num_hidden_layers": 1}
    draw = random.Random(1)
    ids = tuple(FIRST_LETTER + draw.randrange(NUM_PROMPT_IDS) for _ in range(given.context))
    prompt, report = TokenPrompt(ids), open_report([given.device])
    load.MtpNetwork = stubbed_head(given.letters)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        max_tokens = given.context + ROOM_TOKENS
        model_dir = write_random_model(root / "model", shape, given.dtype, max_tokens)
        setup = EngineSetup(model_dir, given.device, given.dtype, max_tokens)
        kept = replace(setup, cache_dir=root / "cache")
        if "answers" in given.parts:
            configs = {way: replace(setup.config, draft=draft) for way, draft in WAYS.items()}
            sizes = {"num_letters": given.letters, "num_tokens": given.tokens}
            asyncio.run(bench_answers(report, configs, prompt, **sizes, rounds=given.rounds))
        if "restores" in given.parts:
            configs = {way: replace(kept.config, draft=draft) for way, draft in WAYS.items()}
            bench_first_tokens(report, kept, configs, prompt, rounds=given.rounds)


if __name__ == "__main__":
    main()
