"""Settings that all tests share: a test marked `gpu` is skipped where there is no CUDA device."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before torch is imported: tiny tensors gain nothing from threads that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch
import uvloop

hypothesis.settings.register_profile("no deadline", deadline=None)  # timings decide no test
hypothesis.settings.load_profile("no deadline")

# Before triton and numba are imported: where there is no GPU, kernels run in the interpreter of
# the one and the simulator of the other.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--groups",
        type=int,
        default=1,
        help="run engines over plans of that many groups, each with a CPU shard or more",
    )


@pytest.fixture(scope="session", autouse=True)
def groups(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many groups the plans of engines have: `pytest --groups 3 tests/engine`."""
    num_groups = request.config.getoption("--groups")
    if num_groups == 1:
        yield 1
        return
    from tests.groups import in_groups

    with in_groups(num_groups):
        yield num_groups


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the server runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", params=["qwen3", "qwen3_5"])
def family(request: pytest.FixtureRequest) -> str:
    """Each family that is served."""
    return request.param


@pytest.fixture(scope="session")
def tiny_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of the family in a directory; tests.tiny.build makes its peer."""
    from tests import tiny

    return tiny.save(tiny.build(family), tmp_path_factory.mktemp(f"tiny_{family}"))
