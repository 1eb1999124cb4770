"""Samples of a backend's passes: how long each takes, and what it gives."""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from against.lookup import either, pipeline

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NUM_LANES, SOURCE = 5, 4  # nothing runs on the lane that is saved but its prompt
NUM_STEPS = 8  # of decoding, in one sample
NUM_PROPOSED, NUM_ACCEPTED = 16, 6  # rows of a round
NUM_ROUNDS = 4
HOST_BYTES = 3 << 30
NODE = b"node"  # its key
DEADLINE_S = 600.0

Case = Callable[[], tuple[float, object]]  # seconds, and what must be the same in both checkouts


def plan_for(spec: Any, order: dict[str, Any]) -> Any:
    """All lanes on one device."""
    make_plan, find_devices = pipeline("make_plan", "plan"), pipeline("find_devices", "devices")
    asked = {
        "dtype": order["dtype"],
        "weights": None,
        "parallel": NUM_LANES,
        "max_ctx_tokens": order["context"] + 256,
        "prefill_chunk_tokens": None,
        "verify_rows": [NUM_PROPOSED],
    }
    if "dtype" not in inspect.signature(make_plan).parameters:
        dtype = asked.pop("dtype")
        precision = either("models.precision:Precision")
        asked["precision"] = precision.of(dtype)
    return make_plan(spec, find_devices([order["device"]]), **asked)


def load_backend(order: dict[str, Any]) -> Any:
    """The model in `dir`, or random weights of `config`."""
    backend = pipeline("LayerSplitBackend", "backend")
    host_memory = pipeline("host_memory", "devices")
    memory = host_memory([order["device"]], HOST_BYTES)
    if hasattr(memory, "wait"):
        memory.wait(DEADLINE_S)  # pinned while nothing is measured
    if "dir" in order:
        spec = either("models.config:read_spec", "models.spec:read_spec")(Path(order["dir"]))
        return backend.open(Path(order["dir"]), spec, plan_for(spec, order), memory=memory)
    spec = either("models.config:parse_spec", "models.spec:parse_spec")(order["config"])
    weights = DrawnAlike(DTYPES[order["dtype"]], place_of(order["device"]))
    return backend.load(spec, plan_for(spec, order), weights, memory=memory)


class DrawnAlike:
    """Random weights that are the same in both checkouts, whatever their RandomSource draws."""

    def __init__(self, dtype: torch.dtype, place: torch.device) -> None:
        self._own = either("models.loader:RandomSource")(dtype, place)
        self._generator = torch.Generator(place)
        self._dtype = dtype
        self._place = place

    def encoding(self, name: str) -> Any:
        return self._own.encoding(name)

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        seed = hashlib.blake2b(name.encode(), digest_size=7).digest()
        self._generator.manual_seed(int.from_bytes(seed))
        random = torch.randn(shape, generator=self._generator, device=self._place)
        return (random * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)).to(self._dtype)


def place_of(device: str) -> torch.device:
    return torch.device(device.replace("hip", "cuda").replace("cpu:0", "cpu"))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Passes:
    """Samples of a backend: each brings its best tokens to the host, as an engine does."""

    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(order["threads"] or torch.get_num_threads())
        self._backend = load_backend(order)
        self._nodes = getattr(self._backend, "nodes", self._backend)
        self._place = place_of(order["device"])
        self._context = order["context"]
        tokens = torch.randint(
            10, 400, (self._context,), generator=torch.Generator().manual_seed(0)
        )
        self._prompt = tokens.tolist()
        self._span = either("hoststore.nodes:Span", "kv.node:Span")
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

    def _prefill(self, lane: int) -> tuple[float, object]:
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

    def _decode(self, num_lanes: int) -> tuple[float, object]:
        self._restore()  # steps move the state of recurrent layers
        lanes, tokens, said = list(range(num_lanes)), [1] * num_lanes, []
        synchronize()
        started = time.perf_counter()
        for position in range(self._context, self._context + NUM_STEPS):
            logits = rows_of(self._backend.decode(lanes, [position] * num_lanes, tokens))
            tokens = logits.argmax(-1).tolist()
            said.append(tokens[0])
        return (time.perf_counter() - started) / NUM_STEPS, said

    def _rounds(self) -> tuple[float, object]:
        self._restore()
        rows = torch.arange(NUM_PROPOSED, device=self._place)[None] + 10
        said = []
        synchronize()
        started = time.perf_counter()
        for i in range(NUM_ROUNDS):
            begin = self._context + i * NUM_ACCEPTED
            logits = rows_of(self._backend.verify([0], [begin], rows))
            said.append(logits.argmax(-1).tolist())
            self._backend.commit([list(range(NUM_ACCEPTED))])
            synchronize()
        return (time.perf_counter() - started) / NUM_ROUNDS, said

    def _save(self) -> tuple[float, object]:
        backend = self._backend
        self._nodes.drop(NODE)
        synchronize()
        started = time.perf_counter()
        ticket = self._nodes.save(SOURCE, NODE, self._span(0, self._context, True))
        wait(ticket, lambda: backend.saved(NODE))
        return time.perf_counter() - started, None

    def _restore(self) -> tuple[float, object]:
        backend = self._backend
        synchronize()
        started = time.perf_counter()
        ticket = self._nodes.restore(0, [NODE], self._context)
        wait(ticket, lambda: backend.settled(0))
        synchronize()
        return time.perf_counter() - started, None


def rows_of(logits: Any) -> torch.Tensor:
    """Logits as a tensor, where they lie."""
    return logits if isinstance(logits, torch.Tensor) else logits.whole()


def wait(ticket: Any, has_arrived: Callable[[], bool]) -> None:
    """Until what was queued has arrived: by its ticket, or where there is none by asking."""
    if ticket is not None:
        ticket.wait()
        return
    while not has_arrived():
        time.sleep(0)


def digest(tensor: torch.Tensor) -> str:
    return hashlib.blake2b(tensor.float().cpu().numpy().tobytes(), digest_size=8).hexdigest()
