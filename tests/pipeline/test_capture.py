"""Passes give the same results whether or not their kernels were compiled ahead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from luceasync.host_cache.nodes import Span
from luceasync.kernels import kernel
from luceasync.kernels.kernel import Kernel
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.models.triton_ops import TritonOps
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capacity import Pool, PoolRequest
from luceasync.pipeline.capture import compiled_ahead
from luceasync.pipeline.cpu_platform import CpuPlatform
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from tests import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("quick_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run in the interpreter here"),
]
PROMPT, MARK = [5, 9, 2, 7, 3], 3
SHORT_ROWS = (8,)  # the size that it is padded to


class Again:
    """Stands in for Capture: a replay runs the function again, into the same output."""

    device = torch.device("cpu")

    def compile_ahead(self, runs) -> None:
        with compiled_ahead(self.device):
            for run in runs:
                run()

    def __call__(self, run, *, num_warmups: int):
        output = run()

        def replay() -> None:
            found = run()
            if output is not None:
                output.copy_(found)

        return SimpleNamespace(replay=replay, output=output)


@pytest.fixture(scope="module")
def tiny_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of each kind: the interpreter is slow."""
    model = tiny.build(family, 2, kinds=["linear_attention", "full_attention"])
    return tiny.save(model, tmp_path_factory.mktemp("two_layers"))


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """New memory holds NaN, which kernels that are not launched leave there."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def opened(
    model_dir: Path, *, max_ctx_tokens: int = 128, pool: PoolRequest | None = None
) -> LayerSplitBackend:
    """Over two shards."""
    spec = read_spec(model_dir)
    plan = make_plan(
        spec,
        [replace(offer_of(f"cpu:{i}", 2**33), short_rows=SHORT_ROWS) for i in range(2)],
        precision=Precision.of("fp32"),
        weights=[1.0, 1.0],
        parallel=1,
        max_ctx_tokens=max_ctx_tokens,
        prefill_chunk_tokens=64,
        pool=pool,
    )
    return LayerSplitBackend.open(ModelFiles(model_dir), plan)


def logits(model_dir: Path) -> torch.Tensor:
    """A short prompt."""
    with closing(opened(model_dir)) as backend:
        found = backend.prefill(0, 0, PROMPT, project=True)
        assert found is not None
        return found.clone()


def from_within(model_dir: Path) -> torch.Tensor:
    """A short prompt, and its last tokens from a state saved within it."""
    with closing(opened(model_dir)) as backend:
        found = [backend.prefill(0, 0, PROMPT, project=True, mark=MARK).clone()]
        backend.nodes.save(0, "n", Span(0, MARK, with_state=True))
        backend.nodes.restore(0, ["n"], MARK)
        found.append(backend.prefill(0, MARK, PROMPT[MARK:], project=True).clone())
        return torch.cat(found)


def test_what_fills_up_a_short_chunk_is_no_trace_of_it(tiny_dir, unwritten_is_nan, monkeypatch):
    expected = logits(tiny_dir)
    monkeypatch.setattr(CpuPlatform, "ops", property(lambda self: TritonOps()))
    monkeypatch.setattr(CpuPlatform, "passes", lambda self, *, eager, captured: captured(Again()))
    assert torch.allclose(logits(tiny_dir), expected, atol=1e-4)


def test_what_sees_an_absent_past_is_compiled_ahead_too(tiny_dir, monkeypatch):
    ahead: set[str] = set()
    launched = Kernel.__getitem__

    def launch(self: Kernel, grid: tuple[int, ...]):
        if kernel._ahead.get():
            ahead.add(self._jit.fn.__name__)
        return launched(self, grid)

    monkeypatch.setattr(Kernel, "__getitem__", launch)
    monkeypatch.setattr(CpuPlatform, "ops", property(lambda self: TritonOps()))
    monkeypatch.setattr(CpuPlatform, "passes", lambda self, *, eager, captured: captured(Again()))
    pool = PoolRequest(448, Pool("qk", 64), 2**30)
    with closing(opened(tiny_dir, max_ctx_tokens=1024, pool=pool)):
        assert {"_merge_kernel", "_chunk_scores_kernel"} <= ahead


@pytest.mark.parametrize("family", ["qwen3_5"], indirect=True, scope="session")
def test_the_state_within_a_short_chunk_is_taken_between_two_passes(tiny_dir, monkeypatch):
    expected = from_within(tiny_dir)
    monkeypatch.setattr(CpuPlatform, "ops", property(lambda self: TritonOps()))
    monkeypatch.setattr(CpuPlatform, "passes", lambda self, *, eager, captured: captured(Again()))
    assert torch.allclose(from_within(tiny_dir), expected, atol=1e-4)
