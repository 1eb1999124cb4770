"""A conversation whose context is many times a lane's pages: what its turns restore, and how soon.

    python scripts/bench_paged_turns.py [--shape qwen3.5-27b --device cuda:0 --context 131072]

Random weights; the same turns with all pages beside. `line`: the longer of the keys and values from
pinned memory and of the pass over what is new (by lanes with all pages), what stays on the device,
a step, and after a restart the files. No first token can be there sooner.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from training.recall.facts import EOS, PAD
from training.recall.network import Network
from training.train_recall import FORMS, export

from luceasync.bench.device import at_rest, by_events
from luceasync.bench.reading import fill_from, prepare
from luceasync.bench.rounds import measure
from luceasync.bench.shapes import SHAPES
from luceasync.bench.small import SMALL
from luceasync.config import (
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.disk_cache.disk import NUM_READERS
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.models.config import parse_spec
from luceasync.models.loader import RandomSource
from luceasync.pipeline import backend
from luceasync.pipeline.platform import open_platform
from luceasync.request import Finish, Request, Sampling, TokenPrompt

NUM_SAID, NUM_ADDED = 48, 80  # tokens of an answer, and of what a user then says
READING_S = 3.0  # from an answer to what is said then: host memory is made ready meanwhile
ROOM_TOKENS = 4096  # behind the context
COPY_BYTES = 256 << 20
FORM = FORMS["small"]  # its tokenizer is that of all shapes here


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, *SMALL], help="default: the small form's")
    parser.add_argument("--device", default="cpu:0")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="default: by the device")
    parser.add_argument("--context", type=int, default=16000)
    parser.add_argument("--pool", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--memory", type=int, default=2, help="of nodes, GiB")
    parser.add_argument("--interval", type=int, default=2048, help="tokens from node to node")
    parser.add_argument("--restart", action="store_true", help="a turn more, from cold files")
    parser.add_argument("--paged-only", action="store_true", help="no lanes that hold everything")
    args = parser.parse_args()
    args.dtype = args.dtype or ("fp32" if args.device.startswith("cpu") else "bf16")
    columns = ("pages for", "turn", "prompt", "restored", "restore, ms", "first token, s")
    print(f"| {' | '.join((*columns, 'line, s', 'first / line', 'absent'))} |\n|{'---|' * 9}")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder)
        sizes = replace(FORM.sizes, max_positions=2 * args.context)
        export(Network(sizes), FORM, model_dir)
        if args.shape is not None:
            shape = {**SHAPES, **SMALL}[args.shape]
            _reshape(model_dir / "config.json", shape, 2 * args.context)
        with _random_weights(args):
            asyncio.run(_talks(model_dir, args))


def _reshape(path: Path, shape: Mapping[str, Any], max_positions: int) -> None:
    """Another shape, but for its words."""
    words = {"vocab_size": FORM.sizes.vocab_size, "eos_token_id": EOS, "pad_token_id": PAD}
    config = {**shape, **words, "max_position_embeddings": max_positions}
    path.write_text(json.dumps(config), encoding="utf-8")


@contextmanager
def _random_weights(args: argparse.Namespace) -> Iterator[None]:
    """Inside it models are read from nowhere: their weights are made where they are to lie."""
    dtype = torch.float32 if args.dtype == "fp32" else torch.bfloat16
    place = open_platform(args.device).device

    class Anywhere:
        @contextmanager
        def open(self, model_dir: Path) -> Iterator[RandomSource]:
            yield RandomSource(dtype, place)

    found, backend.format_of = backend.format_of, lambda model_dir: Anywhere()
    try:
        yield
    finally:
        backend.format_of = found


async def _talks(model_dir: Path, args: argparse.Namespace) -> None:
    """Each turn where all is here, and then with a pool."""
    token_s = _seconds_of_token(model_dir, args)
    talks = [_Talk(args, pool) for pool in ((args.pool,) if args.paged_only else (None, args.pool))]
    pass_s = 0.0
    async with AsyncExitStack() as stack:
        for talk in talks:
            engine = build_engine(_config(model_dir, args, talk.pool))
            talk.engine = await stack.enter_async_context(engine)
            await engine.load()
        for turn in range(1, args.turns + 1):
            pass_s = 0.0
            for talk in talks:
                pass_s = await talk.turn(str(turn), token_s, pass_s)
    pass_s = 0.0
    for talk in talks if args.restart else ():
        config = _config(model_dir, args, talk.pool)
        assert config.cache.cache_dir is not None
        files = [*config.cache.cache_dir.rglob("*.safetensors")]
        files_s = _seconds_of_files(files)
        async with build_engine(config) as talk.engine:
            await talk.engine.load()
            prepare(files, "disk")
            pass_s = await talk.turn("restart", token_s, pass_s, files_s)


def _config(model_dir: Path, args: argparse.Namespace, pool: int | None) -> Config:
    cache_dir = model_dir / f"nodes-{pool}" if args.restart else None
    return Config(
        model=ModelConfig(model_dir=model_dir, dtype=args.dtype),
        placement=PlacementConfig(device=args.device),
        engine=EngineConfig(parallel=1, max_ctx_tokens=args.context + ROOM_TOKENS),
        cache=CacheConfig(args.memory << 30, cache_dir, interval_tokens=args.interval),
        draft=DraftConfig(draft_dir="none"),
        kvflash=KvFlashConfig(pool),
    )


class _Talk:
    """A conversation with one engine."""

    engine: LocalEngine

    def __init__(self, args: argparse.Namespace, pool: int | None) -> None:
        self.pool = pool
        self._random = random.Random(1)
        self._history = self._words(args.context)

    async def turn(self, name: str, token_s: float, pass_s: float, files_s: float = 0.0) -> float:
        """Tell of a turn: `pass_s` is what its pass over what is new takes where all is here,
        `files_s` what reading them takes. What the pass took here.
        """
        history = self._history
        said, first_s, finish = await _said(self.engine, history)
        line, held = "| ", finish.residence
        if held is not None:
            line_s = max(len(history) * token_s, pass_s) + held.resident_tokens * token_s
            line_s += files_s + finish.timings.decode_s / (NUM_SAID - 1)
            line = f"{line_s:.3f} | {first_s / line_s:.2f}"
        print(
            f"| {self.pool or 'all'} | {name} | {len(history)} | "
            f"{finish.usage.cached_tokens / len(history):.1%} | "
            f"{finish.restore.restore_s * 1000:.1f} | {first_s:.3f} | {line} | "
            f"{held.absent_tokens if held else 0} |",
            flush=True,
        )
        self._history += [*said, *self._words(NUM_ADDED)]
        await asyncio.sleep(READING_S)
        return finish.timings.prefill_s

    def _words(self, count: int) -> list[int]:
        return [self._random.randrange(5, 60) for _ in range(count)]


def _seconds_of_token(model_dir: Path, args: argparse.Namespace) -> float:
    """What a token's keys and values of all layers take from pinned memory, at a copy's speed."""
    spec = parse_spec(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))
    rows = [tensor for mixer in spec.mixers for tensor in mixer.rows]
    row_bytes = sum(torch.Size(tensor.shape).numel() for tensor in rows)
    row_bytes *= 4 if args.dtype == "fp32" else 2
    device = open_platform(args.device).device
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    copy = {"": lambda: there.copy_(host, non_blocking=True)}
    clock = by_events if device.type == "cuda" else at_rest
    return row_bytes * min(measure(copy, 5, clock=clock)[""]) / COPY_BYTES


def _seconds_of_files(files: Sequence[Path]) -> float:
    """What it takes to read them from the disk, by as many threads as ours."""
    hosts = [torch.zeros(file.stat().st_size, dtype=torch.uint8) for file in files]
    prepare(files, "disk")
    with ThreadPoolExecutor(NUM_READERS) as pool:
        begin = time.perf_counter()
        for _ in pool.map(fill_from, files, hosts):
            pass
        return time.perf_counter() - begin


async def _said(engine: LocalEngine, prompt: list[int]) -> tuple[list[int], float, Finish]:
    begin, first_s, said, finish = time.perf_counter(), 0.0, [], None
    request = Request(
        TokenPrompt(tuple(prompt)), Sampling(temperature=0), max_tokens=NUM_SAID, ignore_eos=True
    )
    async for delta in await engine.open(request):
        if not said and delta.token_ids:
            first_s = time.perf_counter() - begin
        said += delta.token_ids
        finish = delta.finish or finish
    assert finish is not None
    return said, first_s, finish


if __name__ == "__main__":
    main()
