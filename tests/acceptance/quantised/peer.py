"""llama.cpp in its own process, which answers lines.

    PYTHON tests/acceptance/quantised/peer.py FILE.gguf CONTEXT THREADS KV

KV is ggml's number of the type of keys and values: 0 is F32, 1 F16. Runs under the interpreter that
has llama-cpp-python, and imports nothing of ours.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import llama_cpp
import numpy as np
from llama_cpp import Llama


def main(path: str, context: int, num_threads: int, kv: int) -> None:
    """Answer lines. "answer N IDS": logits float32 [vocab] after the ids and after each of N greedy
    tokens, as bytes in hexadecimal. "timed N IDS": seconds of the ids, and of N greedy tokens, each
    by the clock and of the processor. "more N": the same of N greedy tokens more. "tokens TEXT",
    with the text's bytes in hexadecimal: its ids.
    """
    model = Llama(
        path,
        n_ctx=context + 256,
        n_batch=512,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        type_k=kv,
        type_v=kv,
        verbose=False,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        what, *count = line.split()
        if what == "answer":
            model.reset()
            model.eval([int(number) for number in count[1:]])
            for _ in range(int(count[0])):
                logits = last_logits(model)
                print(logits.tobytes().hex(), flush=True)
                model.eval([int(logits.argmax())])
        elif what == "timed":
            model.reset()
            taken = timed(partial(model.eval, [int(number) for number in count[1:]]))
            print(*taken, *timed(partial(steps, model, int(count[0]))), flush=True)
        elif what == "more":
            print(*timed(partial(steps, model, int(count[0]))), flush=True)
        elif what == "tokens":
            text = bytes.fromhex("".join(count))
            print(*model.tokenize(text, add_bos=False, special=False), flush=True)


def steps(model: Llama, count: int) -> None:
    """Greedy tokens."""
    for _ in range(count):
        model.eval([int(last_logits(model).argmax())])


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    begin, busy = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begin, time.process_time() - busy


def last_logits(model: Llama) -> np.ndarray:
    """Logits float32 [vocab] of the last token."""
    address = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return np.ctypeslib.as_array(address, shape=(model.n_vocab(),)).copy()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
