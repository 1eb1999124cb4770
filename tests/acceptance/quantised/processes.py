"""llama.cpp with a file, in its own process; luceasync never imports it."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

FP32, FP16 = 0, 1  # what ggml calls types of keys and values
PROGRAM = Path(__file__).parent / "peer.py"
FILE_TYPES = {"Q8_0": 7, "Q4_K_M": 15}  # llama.cpp's numbers of mixes
# Run by the interpreter that has llama-cpp-python.
REQUANTISE = """
import sys, llama_cpp
source, target, kind = sys.argv[1:]
wanted = llama_cpp.llama_model_quantize_default_params()
wanted.ftype, wanted.nthread = int(kind), 2
sys.exit(llama_cpp.llama_model_quantize(source.encode(), target.encode(), wanted))
"""


def requantise(python: str, source: Path, target: Path, kind: str) -> Path:
    """Have llama.cpp convert a float32 file to one of its mixes; returns `target`."""
    if kind not in FILE_TYPES:
        raise SystemExit(f"{kind}: one of {', '.join(FILE_TYPES)} is expected")
    command = [python, "-c", REQUANTISE, str(source), str(target), str(FILE_TYPES[kind])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return target


class Peer:
    """A running peer.py."""

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

    def answer(self, ids: Sequence[int], num_tokens: int) -> list[np.ndarray]:
        """Logits float32 [vocab] before each of `num_tokens` greedy tokens."""
        self._ask(f"answer {num_tokens} {' '.join(map(str, ids))}")
        lines = [self._answer() for _ in range(num_tokens)]
        return [np.frombuffer(bytes.fromhex(line), np.float32) for line in lines]

    def timed(self, ids: Sequence[int], num_tokens: int) -> list[float]:
        """Seconds of the ids and of `num_tokens` greedy tokens, each by the clock and of the
        processor.
        """
        self._ask(f"timed {num_tokens} {' '.join(map(str, ids))}")
        return [float(number) for number in self._answer().split()]

    def more(self, num_tokens: int) -> list[float]:
        """Seconds of so many greedy tokens more, by the clock and of the processor."""
        self._ask(f"more {num_tokens}")
        return [float(number) for number in self._answer().split()]

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with nothing added; special tokens are ordinary text."""
        found = []
        for text in texts:
            self._ask(f"tokens {text.encode().hex()}")
            found.append([int(number) for number in self._answer().split()])
        return found

    def close(self) -> None:
        """End the process."""
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
