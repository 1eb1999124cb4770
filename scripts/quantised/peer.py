"""llama.cpp in a process of its own, told line by line what to run; it answers with seconds.

    PYTHON scripts/quantised/peer.py FILE.gguf CONTEXT THREADS

Run by the interpreter that has llama-cpp-python; it imports nothing of ours.
"""

from __future__ import annotations

import sys
import time

from llama_cpp import Llama


def main(path: str, context: int, num_threads: int) -> None:
    """Lines "prefill" and "decode N": a prompt of `context` tokens, N tokens after it."""
    model = Llama(
        path,
        n_ctx=context + 256,
        n_batch=512,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        verbose=False,
    )
    prompt = [(7 * i) % 400 + 3 for i in range(context)]
    print("ready", flush=True)
    for line in sys.stdin:
        what, *count = line.split()
        if what == "prefill":
            model.reset()
            begun = time.perf_counter()
            model.eval(prompt)
            print(time.perf_counter() - begun, flush=True)
        else:
            model.n_tokens = context
            begun = time.perf_counter()
            for _ in range(int(count[0])):
                model.eval([1])
            print(time.perf_counter() - begun, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
