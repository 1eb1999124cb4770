"""llama.cpp with a file, in a process of its own (luceasync never imports it)."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

FP32, FP16 = 0, 1  # what ggml calls types of keys and values
PROGRAM = Path(__file__).parent / "peer.py"


class Peer:
    """One that was started, and answers line by line; see scripts/quantised/peer.py."""

    def __init__(self, python: str, path: Path, context: int, kv: int = FP16) -> None:
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            [python, str(PROGRAM), str(path), str(context), threads, str(kv)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def run(self, line: str) -> float:
        """Seconds that it took."""
        self._ask(line)
        return float(self._answer())

    def answer(self, ids: Sequence[int], num_tokens: int) -> list[np.ndarray]:
        """Logits float32 [vocab] before each of so many greedy tokens."""
        self._ask(f"answer {num_tokens} {' '.join(map(str, ids))}")
        lines = [self._answer() for _ in range(num_tokens)]
        return [np.frombuffer(bytes.fromhex(line), np.float32) for line in lines]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, line: str) -> None:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"llama.cpp ended with {self._process.wait(60)}")
        return line
