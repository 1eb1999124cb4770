"""Hold conversations with servers over a small model, and say how much of each prompt they found.

For each flow: cached of ideal tokens with one server, and with a new one for each request. Ideal is
the longest beginning that was seen before; a flow's first request is left out. Every answer must be
that of a server that keeps nothing, in float32.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turns.client import Asked, Client
from turns.flows import FLOWS, Size

from luceasync.config import (
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    EngineConfig,
    ModelConfig,
    PlacementConfig,
)

MAX_CTX_TOKENS = 16384
MEMORY_BYTES = 1 << 30
TEMPLATES = Path(__file__).parent / "turns"


@dataclass(frozen=True, slots=True)
class Cell:
    """What one flow came to; `worst`: tokens that the request that found least was short of."""

    num_cached: int
    num_ideal: int
    worst: int
    is_equal: bool

    @classmethod
    def of(cls, asked: Sequence[Asked], cold: Sequence[Asked]) -> Cell:
        rest = asked[1:]
        return cls(
            sum(a.num_cached for a in rest),
            sum(a.num_ideal for a in rest),
            max((a.num_ideal - a.num_cached for a in rest), default=0),
            [a.answer for a in asked] == [a.answer for a in cold],
        )

    def __str__(self) -> str:
        text = f"{self.num_cached}/{self.num_ideal} (-{self.worst})"
        return text if self.is_equal else f"{text} OTHER TEXT"


def model_copy(model_dir: Path, template: str | None, folder: Path) -> Path:
    """The model under another template, and for a longer context; its weights are linked."""
    folder.mkdir()
    for path in model_dir.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.is_file():
            shutil.copy(path, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = MAX_CTX_TOKENS
    (folder / "config.json").write_text(json.dumps(config))
    if template is not None:
        shutil.copy(TEMPLATES / f"{template}.jinja", folder / "chat_template.jinja")
    return folder


def config_of(
    model_dir: Path, cache_dir: Path | None, chunk_tokens: int, memory_bytes: int
) -> Config:
    return Config(
        model=ModelConfig(model_dir=model_dir, dtype="fp32"),
        placement=PlacementConfig(devices=("cpu",)),
        engine=EngineConfig(
            parallel=1, max_ctx_tokens=MAX_CTX_TOKENS, prefill_chunk_tokens=chunk_tokens
        ),
        cache=CacheConfig(
            cache_dir=cache_dir,
            budget_bytes=None if cache_dir is None else 8 << 30,
            memory_bytes=memory_bytes,
            min_tokens=1,
        ),
    )


async def held(name: str, config: Config, size: Size, *, restarts: bool) -> list[Asked]:
    """The requests of a flow."""
    client = Client(config, restarts=restarts)
    try:
        await FLOWS[name](client, size)
    finally:
        await client.close()
    return client.asked


async def cells(
    name: str, model_dir: Path, size: Size, chunk_tokens: int, memory_bytes: int = MEMORY_BYTES
) -> dict[str, Cell]:
    """What the flow comes to, by kind of server."""
    cold = await held(name, config_of(model_dir, None, chunk_tokens, 0), size, restarts=False)
    in_memory = config_of(model_dir, None, chunk_tokens, memory_bytes)
    found = {"memory": Cell.of(await held(name, in_memory, size, restarts=False), cold)}
    with tempfile.TemporaryDirectory() as cache_dir:
        on_disk = config_of(model_dir, Path(cache_dir), chunk_tokens, memory_bytes)
        found["restart"] = Cell.of(await held(name, on_disk, size, restarts=True), cold)
    return found


async def check(args: argparse.Namespace) -> bool:
    """Print the table; whether every answer was right and no request too short."""
    is_good = True
    size = Size(num_turns=args.turns, num_steps=args.steps)
    with tempfile.TemporaryDirectory() as folder:
        template = None if args.template == "own" else args.template
        model_dir = model_copy(args.model, template, Path(folder) / "model")
        print(f"{args.model.name}, template {args.template}, chunk {args.chunk}", flush=True)
        for name in args.flows:
            found = await cells(name, model_dir, size, args.chunk, args.memory)
            row = "  ".join(f"{kind} {cell!s:28}" for kind, cell in found.items())
            print(f"{name:24}  {row}", flush=True)
            is_good &= all(c.is_equal and c.worst <= args.short for c in found.values())
    return is_good


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flows", nargs="*", default=list(FLOWS), help=", ".join(FLOWS))
    parser.add_argument("--model", type=Path, default=BUNDLED_MODEL_DIR)
    parser.add_argument("--template", choices=("thinking", "own"), default="thinking")
    parser.add_argument("--chunk", type=int, default=256, help="tokens of a chunk of a prefill")
    parser.add_argument("--memory", type=int, default=MEMORY_BYTES, help="bytes for prefixes")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3, help="of an agent's turn")
    parser.add_argument("--short", type=int, default=64, help="tokens that a request may miss")
    return parser.parse_args()


if __name__ == "__main__":
    logging.disable(logging.INFO)
    sys.exit(0 if asyncio.run(check(arguments())) else 1)
