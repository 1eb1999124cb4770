"""Settings that all tests share: a test marked `gpu` is skipped where there is no CUDA device."""

import asyncio
import gc
import os
import random
import sys
import threading
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

# Before torch is imported: tiny tensors gain nothing from threads that wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import uvloop

from tests.combinations import covering
from tests.forked_backends import Forks
from tests.renderers import Renderers

hypothesis.settings.register_profile("no deadline", deadline=None)  # timings decide no test
hypothesis.settings.load_profile("no deadline")


def _settle_kernels() -> None:
    """Before triton and numba are imported: where there is no GPU, kernels run in the interpreter
    of the one and the simulator of the other.
    """
    if not _has_gpu():
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _hands_out(words: list[str]) -> bool:
    """Whether these start xdist's processes: the last number of them counts."""
    wanted = "0"
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word in ("-n", "--numprocesses"):
            wanted = following
        elif word.startswith(("-n", "--numprocesses=")):
            wanted = word.removeprefix("--numprocesses=").removeprefix("-n")
    return wanted != "0"


# The process that hands tests out, for which the others wait, does without torch. All others settle
# it now: conftest.py of folders that are named to pytest are imported next, some with triton.
if "PYTEST_XDIST_WORKER" in os.environ or not _hands_out(sys.argv):
    # Imports and collection make many objects and free few: no garbage is looked for until then.
    gc.disable()
    _settle_kernels()


class _TorchDraws:
    """Torch's random numbers on CPUs, as hypothesis takes them: each example draws the same again,
    so what fails does so when it is tried once more, with less.
    """

    def seed(self, seed: int) -> None:
        import torch

        torch.default_generator.manual_seed(seed)

    def getstate(self) -> object:
        import torch

        return torch.default_generator.get_state()

    def setstate(self, state: object) -> None:
        import torch

        torch.default_generator.set_state(state)


TORCH_DRAWS = _TorchDraws()  # hypothesis does not keep it alive
hypothesis.register_random(TORCH_DRAWS)


def _seed(name: str) -> None:
    """Begin the random numbers of `name`, of all libraries that have been imported."""
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if torch := sys.modules.get("torch"):
        # torch.manual_seed() formats a stack, for devices that are not initialised yet.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same random numbers whenever and wherever it is run."""
    _seed(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """So does a fixture that several tests share, whichever of them needs it first."""
    if fixturedef.scope == "function":
        return (yield)
    _seed(f"{request.node.nodeid} {fixturedef.argname} {request.param_index}")
    try:
        return (yield)
    finally:
        _seed(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])  # as if it had been there


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--stages",
        type=int,
        default=1,
        help="run engines over plans of that many stages, each with a CPU shard or more",
    )
    parser.addoption(
        "--all",
        action="store_true",
        help="run every combination of parameters, of tests that mark them, not only some that "
        "cover all values or pairs",
    )
    parser.addoption(
        "--few",
        action="store_true",
        help="of each test's combinations of parameters run those that cover each value once, with "
        "one model where a test is run with several",
    )


@pytest.fixture(scope="session", autouse=True)
def stages(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many stages the plans of engines have: `pytest --stages 3 tests/engine`."""
    num_stages = request.config.getoption("--stages")
    if num_stages == 1:
        yield 1
        return
    from tests.stages import in_stages

    with in_stages(num_stages):
        yield num_stages


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def forked_backends(forks: Forks) -> Iterator[None]:
    """Launchers fork backends, which have imported torch then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("luceasync.ipc.launcher.subprocess", forks)
        yield


@pytest.fixture(scope="session")
def renderers() -> Iterator[Renderers]:
    renderers = Renderers()
    yield renderers
    renderers.close()


@pytest.fixture(scope="module", autouse=True)
def reused_renderers(renderers: Renderers) -> Iterator[None]:
    """Engines one after the other render the same template in the same process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("luceasync.text.isolation._RenderProcess", renderers)
        yield


@pytest.fixture(scope="session")
def quick_interpreter() -> Iterator[None]:
    """For kernels that run in Triton's interpreter, as they do where there is no GPU."""
    from triton import knobs

    with pytest.MonkeyPatch.context() as patch:
        if knobs.runtime.interpret:
            from tests.kernels.quick_interpreter import hasten

            hasten(patch)
        yield


@pytest.fixture
def may_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Cleared, it holds every process that is to be started until it is set: what is seen
    meanwhile is seen without it, however soon it would come.
    """
    from luceasync.ipc.launcher import LocalLauncher

    may_start, start = threading.Event(), LocalLauncher._start
    may_start.set()
    monkeypatch.setattr(LocalLauncher, "_start", lambda *a: may_start.wait() and start(*a))
    yield may_start
    may_start.set()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        _leave_out_thorough(config, items)
        _leave_out(config, items)
    items.sort(key=lambda item: item.get_closest_marker("first") is None)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _has_gpu():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and test items stay to the end: a full collection, of which each later test pays
    some, looks at what came after them alone.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


def _leave_out_thorough(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases marked so of each test of which others are run."""
    left = [item for item in items if item.get_closest_marker("thorough")]
    others = {_name_of(item) for item in items if not item.get_closest_marker("thorough")}
    left = [item for item in left if _name_of(item) in others]
    if left:
        config.hook.pytest_deselected(items=left)
        away = {*left}
        items[:] = [item for item in items if item not in away]


def _name_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of combinations that a test marks to be covered only those that are needed for that, with
    --few of all combinations. Of the models of `family` one, another for the next test, with --few
    or where any will do; then all tests of a module have the same, and share its fixtures. What was
    named one by one is run.
    """
    is_few = config.getoption("--few")
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        has_several = isinstance(item, pytest.Function) and hasattr(item, "callspec")
        is_marked = any(item.get_closest_marker(name) for name in ("covered", "any_family"))
        if has_several and (is_marked or (is_few and not _is_left(item))):
            tests.setdefault((item.path, f"{item.cls} {item.originalname}"), []).append(item)
    left: set[pytest.Item] = set()
    for (path, name), these in tests.items():
        marker = these[0].get_closest_marker("covered")
        values = [{k: repr(v) for k, v in each.callspec.params.items()} for each in these]
        places = list(range(len(these)))
        families = sorted({each.get("family", "") for each in values})
        if families[0] and (is_few or these[0].get_closest_marker("any_family")):
            chosen = families[zlib.crc32((name if is_few else path.name).encode()) % len(families)]
            places = [i for i, each in enumerate(values) if each["family"] == chosen]
        if marker or is_few:
            strength = marker.args[0] if marker else 1
            strength = min(strength, 1) if is_few else strength
            places = [places[i] for i in covering([values[i] for i in places], strength)]
        left.update(each for i, each in enumerate(these) if i not in places)
    if left:
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def _is_left(item: pytest.Item) -> bool:
    """Whether the quick loop leaves it out in any case: then it covers nothing."""
    return any(item.get_closest_marker(name) for name in ("slow", "gpu"))


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
