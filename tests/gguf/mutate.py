"""Mutates headers: each must be a spec or a one-line error.

    python -m tests.gguf.mutate NUM_HEADERS SEED FOLDER

Prints how many were refused, the longest time for one, and the peak memory of the process.
"""

from __future__ import annotations

import random
import struct
import sys
import time
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.gguf.model import read_model
from luceasync.gguf.vocabulary import special_tokens_of, templates_of, vocabulary_of
from luceasync.models.gguf_model import read_gguf
from tests.gguf.files import header, qwen3_keys, qwen3_tensors

NUMBERS = (0, 1, 2, 8, 9, 255, 1 << 16, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, (1 << 64) - 1)


def mutated(begin: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, numbers written over, parts cut out, doubled or moved."""
    content = bytearray(begin)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(content) + 1)
        match chance.randrange(6):
            case 0:
                content[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                content[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
            case 2:
                content[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS) & 0xFFFFFFFF)
            case 3:
                del content[at : at + chance.randrange(1, 64)]
            case 4:
                content[at:at] = content[at : at + chance.randrange(1, 64)]
            case 5:
                del content[at:]
        content = content or bytearray(1)
    return bytes(content)


def run(num_headers: int, seed: int, folder: Path) -> tuple[int, float]:
    """How many were refused, and the longest time of one."""
    chance, refused, longest_s = random.Random(seed), 0, 0.0
    tensors = qwen3_tensors()
    begin = header(qwen3_keys(), tensors)
    room = bytes(sum(-(-size // 32) * 32 for *_, size in tensors.values()))
    path = folder / "mutant.gguf"
    for _ in range(num_headers):
        path.write_bytes(mutated(begin, chance) + room)
        started_s = time.perf_counter()
        try:
            model = read_model(path)
            contents = read_gguf(model)
            assert all(stored.encoding for stored in contents.stored.values())
            vocabulary_of(model), templates_of(model), special_tokens_of(model)
        except ModelError as error:
            refused += 1
            assert "\n" not in str(error), str(error)
            assert len(str(error)) < 4096, len(str(error))
        longest_s = max(longest_s, time.perf_counter() - started_s)
    return refused, longest_s


if __name__ == "__main__":
    number, seed, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    found, longest_s = run(number, seed, folder)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_mb = int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6
    print(f"{found} of {number} refused, longest {longest_s * 1000:.1f} ms, {peak_mb:.1f} MB")
