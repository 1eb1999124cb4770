"""Models of random weights, and the passes over one that are measured."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from luceasync.bench.device import synchronize
from luceasync.bench.mixes import FormOf
from luceasync.bench.shapes import Shape
from luceasync.host_cache.arena import HostMemory
from luceasync.models.config import parse_spec
from luceasync.models.forms import Dense
from luceasync.models.loader import RandomSource
from luceasync.models.precision import Dtype, Precision, torch_dtype
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import AskedPool, Guest
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.platform import open_platform
from luceasync.process_memory import freeze_heap
from luceasync.ranking.logits import BEST

SPAN = 32  # positions
DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")


def plan_for(
    shape: Shape,
    devices: Sequence[str],
    *,
    parallel: int,
    max_ctx_tokens: int,
    dtype: Dtype = "bf16",
    verify_rows: Sequence[int] = (),
    guest: Guest | None = None,
    pool: AskedPool | None = None,
    form_of: FormOf = lambda name: Dense(),
) -> Plan:
    """Layers in even shares on the devices. `form_of`: how each tensor would be stored."""
    return make_plan(
        parse_spec(dict(shape)),
        find_devices(devices),
        precision=Precision.of(dtype),
        weights=[1.0] * len(devices),
        parallel=parallel,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=None,
        verify_rows=verify_rows,
        guest=guest,
        pool=pool,
        form_of=form_of,
    )


def load_random(
    shape: Shape,
    plan: Plan,
    *,
    taps: Sequence[int] = (),
    memory: HostMemory | None = None,
    form_of: FormOf = lambda name: Dense(),
) -> LayerSplitBackend:
    """A backend with random weights of the shape, as planned. As a server that is ready, it leaves
    the heap out of collections, which steps would wait for.
    """
    gc.unfreeze()  # what an earlier model has left may go
    place = open_platform(plan.shards[0].device).device
    source = RandomSource(torch_dtype(plan.precision.weights), place, form_of=form_of)
    backend = LayerSplitBackend.load(
        parse_spec(dict(shape)), plan, source, taps=taps, memory=memory
    )
    freeze_heap()
    return backend


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that every vocabulary has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 500, (num_tokens,), generator=generator).tolist()


def prefill(backend: LayerSplitBackend, lane: int, prompt: Sequence[int]) -> torch.Tensor:
    """Run the prompt on the lane, chunk by chunk. Returns its logits float32 [vocab], when they
    are there.
    """
    backend.reset(lane)
    chunk, logits = backend.plan.prefill_chunk_tokens, None
    for begin in range(0, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        logits = backend.prefill(lane, begin, prompt[begin:end], project=end == len(prompt))
    assert logits is not None, "a prompt has tokens"
    synchronize()
    return logits


class Decoding:
    """Greedy decoding on the first `num_lanes` lanes as the engine runs it: the chosen tokens come
    to the host. Each call is one step after which anything may come; after SPAN of them the first
    position comes again, and keys and values are written again.
    """

    def __init__(self, backend: LayerSplitBackend, num_lanes: int, position: int) -> None:
        self._backend = backend
        self._lanes = list(range(num_lanes))
        self._num_steps = 0
        self.position = position  # of the first one
        self._tokens = [1] * num_lanes

    def __call__(self) -> None:
        self._step(self.position + self._num_steps, goes_on=False)
        self._num_steps = (self._num_steps + 1) % SPAN

    def steps(self, num_steps: int) -> None:
        """Steps at one position after the other, of which all but the last are followed by one: it
        may begin before the host has their tokens.
        """
        end = self.position + num_steps
        for position in range(self.position, end):
            self._step(position, goes_on=position + 1 < end)

    def _step(self, position: int, *, goes_on: bool) -> None:
        logits = self._backend.decode(self._lanes, [position] * len(self._lanes), self._tokens)
        ranking = logits.rank(BEST)
        if goes_on:
            self._backend.run_ahead()
        self._tokens = ranking.candidates().best.tolist()
