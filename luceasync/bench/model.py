"""Models to measure, with random weights or their own, and passes over them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from luceasync.bench.device import synchronize
from luceasync.bench.shapes import SHAPES, EncodingOf, Shape, encoding_of, shape_of
from luceasync.errors import ConfigError
from luceasync.host_cache.arena import HostMemory
from luceasync.models import formats
from luceasync.models.encodings import DenseEncoding, Encoding
from luceasync.models.encodings import Shape as TensorShape
from luceasync.models.files import ModelFiles, parse_spec
from luceasync.models.loader import RandomSource, TensorSource
from luceasync.models.precision import Dtype, Precision, torch_dtype
from luceasync.models.quant.checkpoints.module import Scheme
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import DraftFootprint, PoolRequest
from luceasync.pipeline.devices import default_device, find_devices
from luceasync.pipeline.plan import Plan, make_plan
from luceasync.pipeline.platform import open_platform
from luceasync.process_memory import freeze_heap
from luceasync.ranking.logits import BEST

MARK = "random.json"  # the dtype of the weights, in a model's directory
SPAN = 32  # positions
DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")
DEFAULT_THREADS = torch.get_num_threads()


def plan_for(
    shape: Shape,
    devices: Sequence[str],
    *,
    parallel: int,
    max_ctx_tokens: int,
    dtype: Dtype = "bf16",
    verify_rows: Sequence[int] = (),
    drafter: DraftFootprint | None = None,
    pool: PoolRequest | None = None,
) -> Plan:
    """A plan for unquantised weights, with equal shares of layers on the devices."""
    return make_plan(
        parse_spec(dict(shape)),
        find_devices(devices),
        precision=Precision.of(dtype),
        weights=[1.0] * len(devices),
        parallel=parallel,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=None,
        verify_rows=verify_rows,
        drafter=drafter,
        pool=pool,
    )


def load_random(
    shape: Shape,
    plan: Plan,
    *,
    taps: Sequence[int] = (),
    memory: HostMemory | None = None,
) -> LayerSplitBackend:
    """A backend with random weights of the shape, according to the plan."""
    return _with_random_weights(
        parse_spec(dict(shape)), plan, lambda name: DenseEncoding(), taps=taps, memory=memory
    )


def _with_random_weights(
    spec: ModelSpec,
    plan: Plan,
    encoding_of: EncodingOf,
    *,
    taps: Sequence[int] = (),
    memory: HostMemory | None = None,
) -> LayerSplitBackend:
    gc.unfreeze()  # releases an earlier model
    place = open_platform(plan.shards[0].device).device
    source = RandomSource(torch_dtype(plan.precision.weights), place, encoding_of=encoding_of)
    backend = LayerSplitBackend.load(spec, plan, source, taps=taps, memory=memory)
    freeze_heap()  # as a server does once it is ready: collections skip the model
    return backend


@dataclass(frozen=True)
class BenchModel:
    """A model to measure: a `shape` with random weights, or the model at `path`."""

    name: str
    spec: ModelSpec
    encoding_of: EncodingOf
    shape: Shape | None = None
    path: Path | None = None

    def plan(
        self,
        devices: Sequence[str],
        *,
        parallel: int,
        max_ctx_tokens: int,
        dtype: Dtype = "bf16",
        verify_rows: Sequence[int] = (),
    ) -> Plan:
        """A plan with equal shares of layers on the devices."""
        return make_plan(
            self.spec,
            find_devices(devices),
            precision=Precision.of(dtype),
            weights=[1.0] * len(devices),
            parallel=parallel,
            max_ctx_tokens=max_ctx_tokens,
            prefill_chunk_tokens=None,
            verify_rows=verify_rows,
            encoding_of=self.encoding_of,
        )

    def load(self, plan: Plan) -> LayerSplitBackend:
        """A backend according to the plan. CPU threads are set as in the engine."""
        torch.set_num_threads(DEFAULT_THREADS)
        if self.path is not None:
            backend = LayerSplitBackend.open(ModelFiles(self.path), plan)
        else:
            backend = _with_random_weights(self.spec, plan, self.encoding_of)
        if plan.suits_one_thread:
            torch.set_num_threads(1)
        return backend


def parse_model(text: str) -> BenchModel:
    """The model that a flag names: a shape such as `qwen3-4b`, a shape with a quantised mix such as
    `qwen3-4b:Q4_K_M`, or a directory or GGUF file. Raises ConfigError.
    """
    if Path(text).exists():
        path = Path(text)
        files = ModelFiles(path)
        return BenchModel(text, files.spec, files.weights.encoding, path=path)
    name, _, mix = text.partition(":")
    try:
        shape = shape_of(name)
        encodings = encoding_of(mix or "plain", shape["num_hidden_layers"])
        encodings("layers.0.mlp.down_proj.weight")
    except KeyError as error:
        allowed = ", ".join((*SHAPES, "small", "small-hybrid"))
        raise ConfigError(
            f"--models {text}: {error} is unknown; allowed: {allowed}, each also with a mix such "
            "as :Q4_K_M, or the path of a model"
        ) from None
    return BenchModel(text, parse_spec(dict(shape)), encodings, shape)


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids that are in every vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 500, (num_tokens,), generator=generator).tolist()


def prefill(backend: LayerSplitBackend, lane: int, prompt: Sequence[int]) -> torch.Tensor:
    """Run the prompt on the lane, chunk by chunk. Returns its logits, float32 [vocab], once they
    are computed.
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
    """Greedy decoding on the first `num_lanes` lanes as in the engine: the chosen tokens are copied
    to the host. Each call is one step, without the start of another. After SPAN calls it returns to
    the first position, and overwrites keys and values.
    """

    def __init__(self, backend: LayerSplitBackend, num_lanes: int, position: int) -> None:
        self._backend = backend
        self._lanes = list(range(num_lanes))
        self._num_steps = 0
        self.position = position  # of the first step
        self._tokens = [1] * num_lanes

    def __call__(self) -> None:
        self._step(self.position + self._num_steps, goes_on=False)
        self._num_steps = (self._num_steps + 1) % SPAN

    def steps(self, num_steps: int) -> None:
        """Steps at consecutive positions. Each step except the last starts the next one before its
        own tokens are on the host.
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


class RandomFormat:
    """The Format of a directory with weights that are generated when they are read."""

    def is_at(self, model_dir: Path) -> bool:
        return (model_dir / MARK).exists()

    def weights(self, model_dir: Path, scheme: Scheme | None) -> RandomWeights:
        return RandomWeights(model_dir / MARK)


class RandomWeights:
    """The StoredWeights of a model with random numbers."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    @property
    def paths(self) -> list[Path]:
        return [self._mark]

    def encoding(self, name: str) -> Encoding:
        return DenseEncoding()

    def holds(self, name: str) -> bool:
        """True: tensors are generated on request."""
        return True

    def check(self, shapes: Mapping[str, TensorShape]) -> None:
        """No-op: every tensor can be generated."""

    def check_unused(self, shapes: Mapping[str, TensorShape]) -> None:
        """No-op: only requested tensors are generated."""

    def is_tied(self, head: str, embedding: str) -> bool:
        """True: a tied head is not generated."""
        return True

    @contextmanager
    def open(self) -> Iterator[TensorSource]:
        dtype = json.loads(self._mark.read_text(encoding="utf-8"))
        device = open_platform(default_device()).device
        yield RandomSource(torch_dtype(dtype), device)


RANDOM_FORMAT = RandomFormat()


def write_model(model_dir: Path, shape: Shape, dtype: Dtype) -> None:
    """Write a model of random weights, which are the same in every process that reads it after
    calling `register_random_format`.
    """
    (model_dir / "config.json").write_text(json.dumps(dict(shape)), encoding="utf-8")
    (model_dir / MARK).write_text(json.dumps(dtype), encoding="utf-8")


def register_random_format() -> None:
    """Allow this process to read models that `write_model` wrote."""
    if RANDOM_FORMAT not in formats.FORMATS:
        formats.FORMATS.insert(0, RANDOM_FORMAT)
