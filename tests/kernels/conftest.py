"""Kernel tests run on a GPU if there is one, else in Triton's interpreter on the CPU.

This module is imported before that is decided, so only fixtures may import what imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tests.kernels.emulated.program import Compiler


@pytest.fixture(autouse=True)
def kernels_run_quickly(quick_interpreter: None) -> None:
    """Kernels in Triton's interpreter."""


@pytest.fixture
def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with NumPy, whose bits of a row depend on the number of rows on
    some CPUs, unlike on a GPU. Multiply each row by itself.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    multiply = InterpreterBuilder.create_dot

    def row_by_row(self, a, b, d, *options):
        a.data, b.data = a.data[..., :, None, :], b.data[..., None, :, :]
        d.data = d.data[..., :, None, :]
        found = multiply(self, a, b, d, *options)
        a.data, b.data, d.data = a.data[..., 0, :], b.data[..., 0, :, :], d.data[..., 0, :]
        found.data = found.data[..., 0, :]
        return found

    monkeypatch.setattr(InterpreterBuilder, "create_dot", row_by_row)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter is slow, and computes padding with NumPy, which warns; a GPU does not. Where
    there is one, what runs on `device` is among the tests of GPUs.
    """
    has_gpu = torch.cuda.is_available()
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
            if has_gpu and "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """The compiler of CUDA C++ for CPUs."""
    from tests.kernels.emulated.program import Compiler, compiler_here

    command = compiler_here()
    if command is None:
        pytest.skip("no C++ compiler is installed")
    return Compiler(command, tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulate(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., torch.device]]:
    """Run a module's programs, by the names of their functions, on the CPU as on a GPU with
    clusters. Unwritten numbers of a new tensor are NaN, or the largest integer.
    """

    from tests.kernels.emulated.program import EmulatedProgram

    def run_here(module: ModuleType, **programs: str) -> torch.device:
        for attribute, name in programs.items():
            program = EmulatedProgram(module.SOURCE, name, compiler)
            monkeypatch.setattr(module, attribute, program)
        monkeypatch.setattr(module, "can_overlap", lambda index: True)
        return torch.device("cpu")

    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield run_here
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["fp32", "half"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """float32 and a half: bfloat16, but the interpreter multiplies float16 only."""
    if request.param == "fp32":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_available() else torch.float16
