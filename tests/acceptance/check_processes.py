"""Prefixes that a model over one, two or three processes wrote, restored by another arrangement.

    python -m tests.acceptance.check_processes [--tokens 10,8192] [--pairs one:three|all]

Float32, greedy, dialogues that the bundled model knows, with longer contexts; the CPU plays other
vendors. The second of a pair must find the prefix on disk, give the answer that one process without
a cache gives, and accept drafted tokens. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luceasync.bench.report import Report
from luceasync.config import (
    BUNDLED_DRAFT_DIR,
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.request import Finish, Request, TokenPrompt
from luceasync.text.tokenizer import Tokenizer
from tests.acceptance import command

ROOT = Path(__file__).parents[2]
CONTEXT_TOKENS, NUM_SAID = 16384, 48
# Devices in the order of the layers, and the names under which a backend offers the CPU.
ARRANGEMENTS = {
    "one": ("cpu:0,cpu:1,cpu:2", ""),
    "two": ("cpu:0,hip:0,hip:1", "hip:0=cpu:0 hip:1=cpu:1"),
    "three": ("cpu:0,hip:0,cuda:0", "hip:0=cpu:0 cuda:0=cpu:0"),
    "between": ("cpu:0,hip:0,cpu:1", "hip:0=cpu:0"),
}
PAIRS = ["one:three", "three:one", "three:between", "between:two", "two:three"]
QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
END = "<|im_end|>\n"
ASKED = ("What does json.dumps do?", "Print the docstring of logging.exception")
Transport = Literal["auto", "shared", "stream"]


@dataclass(frozen=True)
class Said:
    """An answer, and what the engine's log said of the prefix."""

    ids: tuple[int, ...]
    finish: Finish
    told: str


class Heard(logging.Handler):
    """Collects log records of restored prefixes."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.words = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("adopted node"):
            self.words = record.getMessage()


def with_longer_contexts(source: Path, folder: Path) -> Path:
    """A copy of a model that allows CONTEXT_TOKENS.

    Rotary positions of a model that attends to all of them turn more slowly ("NTK-aware"):
    distances beyond its training would confuse it. A drafter that attends to its newest tokens sees
    none.
    """
    target = folder / source.name
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    factor = CONTEXT_TOKENS / config["max_position_embeddings"]
    config["max_position_embeddings"] = CONTEXT_TOKENS
    if not config.get("dflash_config", {}).get("ctx_max_tokens"):
        rope = config.get("rope_parameters", config)
        num_turned = config["head_dim"] * rope.get("partial_rotary_factor", 1.0)
        rope["rope_theta"] *= factor ** (num_turned / (num_turned - 2))
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return target


def dialogues(model: Path) -> str:
    """Questions and answers that the bundled model was tested with."""
    lines = (model / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    turns = (json.loads(line) for line in lines if line)
    return "".join(
        f"{QUESTION.format(turn['messages'][0]['content'])}{turn['answer']}{END}" for turn in turns
    )


def backend_program(folder: Path, offers: str) -> Path:
    """A luceasync-backend that offers the CPU under these names."""
    path = folder / "luceasync-backend"
    renamed = "".join(f" --offer {offer}" for offer in offers.split())
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={ROOT}\n"
        f'exec {sys.executable} -m luceasync.backend{renamed} "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


def placed(folder: Path, arrangement: str, transport: Transport) -> PlacementConfig:
    devices, offers = ARRANGEMENTS[arrangement]
    bins = (str(backend_program(folder, offers)),) if offers else ()
    return PlacementConfig(tuple(devices.split(",")), ipc_bins=bins, ipc_transport=transport)


@asynccontextmanager
async def running(
    models: tuple[Path, Path], placement: PlacementConfig, cache_dir: Path, *, tree: bool
) -> AsyncIterator[LocalEngine]:
    target, draft = models
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=target, dtype="fp32"),
            placement=placement,
            engine=EngineConfig(parallel=2, max_ctx_tokens=CONTEXT_TOKENS),
            cache=CacheConfig(
                memory_bytes=1 << 29, cache_dir=cache_dir, budget_bytes=1 << 30, min_tokens=1
            ),
            draft=DraftConfig(draft_dir=draft, ddtree=tree),
        )
    )
    async with engine:
        await engine.load()
        yield engine


async def answer(engine: LocalEngine, prompt: tuple[int, ...]) -> Said:
    """A greedy answer, returned once the disk has its nodes."""
    heard, log = Heard(), logging.getLogger("luceasync.prefix_cache.cache")
    log.setLevel(logging.DEBUG)
    log.addHandler(heard)
    ids: list[int] = []
    finish = None
    asked = Request(TokenPrompt(prompt), max_tokens=NUM_SAID, ignore_eos=True)
    async for delta in await engine.open(asked):
        ids += delta.token_ids
        finish = delta.finish or finish
    log.removeHandler(heard)
    assert finish is not None, "a stream ends with a finish"
    await engine.flush()
    return Said(tuple(ids), finish, heard.words)


def faults(cold: Said, second: Said, arrangement: str) -> Iterator[str]:
    """Errors of a restored answer."""
    if second.ids != cold.ids:
        yield "other tokens"
    if second.finish.restore.tier != "disk":
        yield f"no disk_hit: {second.finish.restore}"
    num_remote = sum(not d.startswith("cpu") for d in ARRANGEMENTS[arrangement][0].split(","))
    expected = f"local_shards={3 - num_remote} remote_shards={num_remote} tier=disk"
    if expected not in second.told:
        yield f"the log says {second.told!r}"
    if not accepted(second):
        yield "no drafted token was accepted"


def accepted(said: Said) -> int:
    """Number of accepted draft tokens."""
    return said.finish.speculation.accepted if said.finish.speculation else 0


@contextmanager
def folders() -> Iterator[list[Path]]:
    """A cache directory, another one that stays apart, and both configurations."""
    with tempfile.TemporaryDirectory() as there:
        found = [Path(there) / name for name in ("cache", "apart", "first", "second")]
        for folder in found:
            folder.mkdir()
        yield found


async def check(report: Report, models: tuple[Path, Path], options: argparse.Namespace) -> bool:
    """Whether every pair is right."""
    tokenizer = Tokenizer.load(models[0])
    told, end = tokenizer.encode(dialogues(models[0])), tokenizer.encode(END)
    cases = itertools.product(options.tokens, options.pairs, options.transports, options.kinds)
    columns = ("tokens", "pair", "transport", "kind", "accepted", "by one process", "log", "wrong")
    table = report.table(columns, "")
    is_right = True
    for num_tokens, pair, transport, kind in cases:
        first_asked, then_asked = (tokenizer.encode(QUESTION.format(asked)) for asked in ASKED)
        talk = told * (num_tokens // len(told) + 1)
        begun = (*talk, *first_asked)[-num_tokens:]
        names, is_tree = pair.split(":"), kind == "tree"
        with folders() as (cache_dir, nothing, *places):
            first, second = (placed(*each, transport) for each in zip(places, names, strict=True))
            async with running(models, first, cache_dir, tree=is_tree) as engine:
                said = await answer(engine, begun)
            on = (*begun, *said.ids, *end, *then_asked)
            async with running(models, second, cache_dir, tree=is_tree) as engine:
                found = await answer(engine, on)
            alone = placed(nothing, "one", transport)
            async with running(models, alone, nothing, tree=is_tree) as engine:
                cold = await answer(engine, on)
        wrong = "; ".join(faults(cold, found, names[1]))
        table.add(
            num_tokens, pair, transport, kind, *map(accepted, (found, cold)), found.told, wrong
        )
        is_right &= not wrong
    return is_right


def main() -> None:
    """Run the check and print what was seen."""
    parser = command.parser(__doc__)
    parser.add_argument("--tokens", type=command.numbers, default=[10, 8192])
    parser.add_argument("--pairs", type=command.names, default=PAIRS)
    parser.add_argument("--transports", type=command.names, default=["shared", "stream"])
    parser.add_argument("--kinds", type=command.names, default=["chain", "tree"])
    options = parser.parse_args()
    if options.pairs == ["all"]:
        options.pairs = [":".join(pair) for pair in itertools.permutations(ARRANGEMENTS, 2)]
    report = command.open_report(options)
    with tempfile.TemporaryDirectory() as there:
        models = tuple(
            with_longer_contexts(model, Path(there))
            for model in (BUNDLED_MODEL_DIR, BUNDLED_DRAFT_DIR)
        )
        is_right = asyncio.run(check(report, (models[0], models[1]), options))
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
