"""The program that `luceasync bench against` runs with each checkout's code.

Reads orders as JSON lines and answers with JSON lines. It imports nothing from this package, only
names that both checkouts have; `either` finds those that have moved since 8162231.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

NUM_LANES, SOURCE = 5, 4  # only the prompt of the saved lane runs on it
NUM_STEPS = 8  # of decoding, in one sample
NUM_PROPOSED, NUM_ACCEPTED = 16, 6  # rows of a round
NUM_ROUNDS = 4
HOST_BYTES = 3 << 30
DEADLINE_S = 600.0
NUM_ANSWER_TOKENS = 96
WORDS = "list return the string of module x and dictionary what does json dumps do".split()

Sample = tuple[float, object]  # seconds, and a value that must be equal in both checkouts
Case = Callable[[], Sample]


def either(*places: str) -> Any:
    """The first "module:name" of luceasync that exists."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(f"luceasync.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(places)}")


# --- passes of a backend --------------------------------------------------------------------------


def load_backend(order: dict[str, Any]) -> Any:
    """The model in `dir`, or one of `config` with random weights derived from the
    tensors' names.
    """
    precision = either("models.precision:Precision").of(order["dtype"])
    memory = either("pipeline.devices:host_memory")([order["device"]], HOST_BYTES)
    if hasattr(memory, "wait"):
        memory.wait(DEADLINE_S)  # finish pinning before measuring
    backend = either("pipeline.backend:LayerSplitBackend")
    read_spec, parse_spec = (
        either(f"models.files:{name}", f"models.config:{name}")
        for name in ("read_spec", "parse_spec")
    )
    spec = read_spec(Path(order["dir"])) if "dir" in order else parse_spec(order["config"])
    plan = either("pipeline.plan:make_plan")(
        spec,
        either("pipeline.devices:find_devices")([order["device"]]),
        precision=precision,
        weights=None,
        parallel=NUM_LANES,
        max_ctx_tokens=order["context"] + 256,
        prefill_chunk_tokens=None,
        verify_rows=[NUM_PROPOSED],
    )
    if "dir" not in order:
        torch_dtype = either("models.precision:torch_dtype")(order["dtype"])
        weights = either("models.loader:RandomSource")(torch_dtype, place_of(order["device"]))
        return backend.load(spec, plan, weights, memory=memory)
    try:
        files = either("models.files:ModelFiles")(Path(order["dir"]))
    except ImportError:
        return backend.open(Path(order["dir"]), spec, plan, memory=memory)
    return backend.open(files, plan, memory=memory)


def place_of(device: str) -> torch.device:
    return torch.device(device.replace("hip", "cuda").replace("cpu:0", "cpu"))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class CheckoutPasses:
    """Samples of a backend's passes. Each copies its best tokens to the host, as the
    engine does.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(order["threads"] or torch.get_num_threads())
        self._backend = load_backend(order)
        self._place = place_of(order["device"])
        self._context = order["context"]
        generator = torch.Generator().manual_seed(0)
        self._prompt = torch.randint(10, 400, (self._context,), generator=generator).tolist()
        self._span = either("host_cache.nodes:Span", "hoststore.nodes:Span")
        self._key = b"node"
        for lane in range(NUM_LANES):
            self._prefill(lane)
        self._save()
        self.cases: dict[str, Case] = {
            "decode, 1 lane": lambda: self._decode(1),
            "decode, 4 lanes": lambda: self._decode(4),
            f"round: verify {NUM_PROPOSED}, commit {NUM_ACCEPTED}": self._rounds,
            f"prefill of {self._context}": lambda: self._prefill(0),
            "save": self._save,
            "restore": self._restore,
        }

    def close(self) -> None:
        self._backend.close()

    def _prefill(self, lane: int) -> Sample:
        backend, prompt = self._backend, self._prompt
        synchronize()
        started = time.perf_counter()
        backend.reset(lane)
        chunk = backend.plan.prefill_chunk_tokens
        for begin in range(0, len(prompt), chunk):
            end = min(begin + chunk, len(prompt))
            logits = backend.prefill(lane, begin, prompt[begin:end], project=end == len(prompt))
        int(logits.argmax())
        return time.perf_counter() - started, digest(logits)

    def _decode(self, num_lanes: int) -> Sample:
        self._restore()  # steps change the state of recurrent layers
        lanes, tokens, said = list(range(num_lanes)), [1] * num_lanes, []
        synchronize()
        started = time.perf_counter()
        for position in range(self._context, self._context + NUM_STEPS):
            logits = self._backend.decode(lanes, [position] * num_lanes, tokens).whole()
            tokens = logits.argmax(-1).tolist()
            said.append(tokens[0])
        return (time.perf_counter() - started) / NUM_STEPS, said

    def _rounds(self) -> Sample:
        self._restore()
        rows = torch.arange(NUM_PROPOSED, device=self._place)[None] + 10
        said = []
        synchronize()
        started = time.perf_counter()
        for number in range(NUM_ROUNDS):
            begin = self._context + number * NUM_ACCEPTED
            logits = self._backend.verify([0], [begin], rows).whole()
            said.append(logits.argmax(-1).tolist())
            self._backend.commit([list(range(NUM_ACCEPTED))])
            synchronize()
        return (time.perf_counter() - started) / NUM_ROUNDS, said

    def _save(self) -> Sample:
        nodes = self._backend.nodes
        nodes.drop(self._key)
        synchronize()
        started = time.perf_counter()
        nodes.save(SOURCE, self._key, self._span(0, self._context, True)).wait()
        return time.perf_counter() - started, None

    def _restore(self) -> Sample:
        synchronize()
        started = time.perf_counter()
        self._backend.nodes.restore(0, [self._key], self._context).wait()
        synchronize()
        return time.perf_counter() - started, None


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.float().cpu().numpy().tobytes(), digest_size=8).hexdigest()


# --- answers of an engine -------------------------------------------------------------------------


class Answers:
    """Samples of the bundled model in a whole engine, with and without its drafter."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._runner = asyncio.Runner()
        self._engines = {
            name: self._runner.run(self._open(order["device"], draft))
            for name, draft in (("plain", "none"), ("drafter", None))
        }
        self._number = 0
        self.cases: dict[str, Case] = {
            "engine: a plain token": lambda: self._answer("plain"),
            "engine: a token with the drafter": lambda: self._answer("drafter"),
            "engine: first token, new prompt": self._new,
            "engine: first token, kept prompt": self._kept,
        }

    async def _open(self, device: str, draft: str | None) -> Any:
        config = importlib.import_module("luceasync.config")
        asked = config.Config(
            placement=config.PlacementConfig(devices=(device,)),
            draft=config.DraftConfig(draft_dir=draft),
            engine=config.EngineConfig(parallel=4),
            cache=config.CacheConfig(memory_bytes=1 << 30),
        )
        engine = either("engine.start:build_engine")(asked)
        await engine.__aenter__()
        await engine.load()
        return engine

    def close(self) -> None:
        for engine in self._engines.values():
            self._runner.run(engine.__aexit__(None, None, None))
        self._runner.close()

    def _answer(self, name: str) -> Sample:
        times, said = self._ask(name, "What does json.dumps do?", NUM_ANSWER_TOKENS)
        return (times[-1] - times[1]) / (NUM_ANSWER_TOKENS - 1), said

    def _new(self) -> Sample:
        self._number += 1
        times, said = self._ask("plain", self._text(), 1)
        return times[1] - times[0], said

    def _kept(self) -> Sample:
        self._ask("plain", self._text(), 1)
        times, said = self._ask("plain", self._text(), 1)
        return times[1] - times[0], said

    def _text(self) -> str:
        """A text of about 1000 tokens that shares no prefix with earlier ones."""
        return f"{self._number} " + " ".join(WORDS[(i * 7) % len(WORDS)] for i in range(600))

    def _ask(self, name: str, text: str, num_tokens: int) -> tuple[list[float], list[int]]:
        return self._runner.run(self._asked(name, text, num_tokens))

    async def _asked(self, name: str, text: str, num_tokens: int) -> tuple[list[float], list[int]]:
        """The time of the request, the time of each part of the answer, and its tokens."""
        request = importlib.import_module("luceasync.request")
        prompt = request.ChatPrompt([{"role": "user", "content": text}])
        sampling = request.Sampling(temperature=0.0)
        asked = request.Request(prompt, sampling=sampling, max_tokens=num_tokens, ignore_eos=True)
        times, said = [time.perf_counter()], []
        async for delta in await self._engines[name].open(asked):
            times.append(time.perf_counter())
            said += delta.token_ids
        return times, said


# --- orders and replies ---------------------------------------------------------------------------


def serve(orders: Any, replies: Any) -> None:
    """Answer each line with a line."""
    opened: CheckoutPasses | Answers | None = None
    for line in orders:
        order = json.loads(line)
        reply: object = None
        if order["what"] == "open":
            opened = Answers(order) if order["kind"] == "engine" else CheckoutPasses(order)
            reply = list(opened.cases)
        elif order["what"] == "sample":
            assert opened is not None
            reply = opened.cases[order["case"]]()
        else:
            assert opened is not None
            opened.close()
            opened = None
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # keep other output apart from replies
        serve(sys.stdin, replies)
