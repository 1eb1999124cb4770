"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU.

This is read before it is known which, so whatever imports Triton is imported by fixtures.
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
def scalars_of_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 2.4 no longer takes the interpreter's one-element arrays for loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_index)


@pytest.fixture(autouse=True)
def one_patch_for_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter replaces the words of Triton's language at a launch, and again at every call
    of a device function, which takes most of its time. What is replaced already stays.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        """Forgets, with the words, that they were replaced; calls of functions restore nothing."""

        languages = frozenset()

        def restore(self) -> None:
            super().restore()
            replaced.difference_update(self.languages)

    def replace_once(function) -> interpreter._LangPatchScope:
        modules = function.__globals__.values()
        languages = {word for word in (tl, tl.core) if any(word is each for each in modules)}
        if languages <= replaced:
            return Scope()
        scope = replace(function)
        scope.__class__, scope.languages = Scope, frozenset(languages - replaced)
        replaced.update(languages)
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", replace_once)


@pytest.fixture
def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by NumPy: on some CPUs the bits of a row then depend on how
    many there are; on a GPU they do not. Here each row is multiplied by itself.
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
    """The interpreter takes long, and computes padding with numpy, which warns of what a GPU does
    silently.
    """
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Of CUDA C++ for CPUs."""
    from tests.kernels.emulated.program import Compiler, compiler_here

    command = compiler_here()
    if command is None:
        pytest.skip("no C++ compiler is installed")
    return Compiler(command, tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulate(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., torch.device]]:
    """Lets a module's programs, by their functions' names, run on the CPU as on a GPU that has
    clusters. What nobody has written of a new tensor is NaN, or the largest number.
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
