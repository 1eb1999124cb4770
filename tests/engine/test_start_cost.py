"""What a start costs: a CPU loads nothing that only a GPU needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import asyncio, sys
from luceasync.cli.ahead import without_compiler
with without_compiler():
    import torch
from luceasync.config import Config, EngineConfig, PlacementConfig
from luceasync.engine.start import build_engine
from luceasync.request import Request, TextPrompt

async def answer():
    config = Config(
        placement=PlacementConfig(devices=("cpu",)),
        engine=EngineConfig(parallel=1, max_ctx_tokens=512),
    )
    assert config.drafter_dir is not None, "with a drafter and its ring"
    async with build_engine(config) as engine:
        await engine.load()
        async for delta in await engine.open(Request(TextPrompt("Hi"), max_tokens=3)):
            pass

asyncio.run(answer())
HEAVY = ("numba", "llvmlite", "triton", "torch._dynamo", "torch._inductor", "sympy")
HEAVY += ("torch._meta_registrations", "torch._decomp")
print([name for name in HEAVY if name in sys.modules])
"""


@pytest.mark.slow
def test_a_cpu_starts_and_answers_without_compilers():
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
