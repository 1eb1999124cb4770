"""Kernel tests run on a GPU if there is one, else in Triton's interpreter on the CPU.

This module is imported before that is decided, so only fixtures may import what imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from tests.kernels.emulated.program import Compiler


@pytest.fixture(autouse=True)
def scalars_of_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 2.4 no longer accepts the interpreter's one-element arrays as loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_index)


@pytest.fixture(autouse=True)
def one_patch_for_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter patches Triton's language at a launch, and again at every call of a device
    function, which takes most of its time. Patch it once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    replace, replaced = interpreter._patch_lang, set()

    class Scope(interpreter._LangPatchScope):
        """Undo the patch and forget it; calls of device functions restore nothing."""

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


@pytest.fixture(autouse=True)
def types_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each operation the interpreter describes the type of the result anew, which takes a third
    of its time. Let results of equal types share what describes them; nothing changes that.
    """
    from triton.language import core
    from triton.runtime import interpreter

    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    find_numpy_type = interpreter._get_np_dtype
    # By the addresses of element types, which the values keep alive.
    types: dict[tuple[int, ...], dict[str, Any]] = {}
    scalars: dict[int, dict[str, Any]] = {}
    numpy_types: dict[int, tuple[Any, Any]] = {}

    def type_once(self, element_ty, shape) -> None:
        key = (id(element_ty), *[getattr(size, "value", size) for size in shape])
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = self.__dict__ | {"of_tensors": {}}
        self.__dict__.update(types[key])

    def tensor_once(self, handle, type) -> None:
        fields = type.__dict__.get("of_tensors")
        if fields is None:
            fields = scalars.setdefault(id(type), {})
        if not fields:
            make_tensor(self, None, type)
            fields.update(self.__dict__)
        self.__dict__.update(fields, handle=handle, type=type)

    def numpy_type_once(of) -> Any:
        of = of.element_ty if isinstance(of, core.block_type) else of
        if id(of) not in numpy_types:
            numpy_types[id(of)] = of, find_numpy_type(of)
        return numpy_types[id(of)][1]

    monkeypatch.setattr(core.block_type, "__init__", type_once)
    monkeypatch.setattr(core.tensor, "__init__", tensor_once)
    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type_once)


@pytest.fixture(autouse=True)
def equal_types_are_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each operation the interpreter converts both sides to one type and one shape, which
    takes long where nothing is to be done. Return them at once then.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    cast, broadcast = TritonSemantic.cast, TritonSemantic.broadcast_impl_value
    is_equal = core.dtype.__eq__

    def cast_others(self, given, to, *rounding) -> Any:
        return given if given.type.scalar is to else cast(self, given, to, *rounding)

    def broadcast_others(self, left, right) -> Any:
        shapes = left.type.__dict__.get("shape"), right.type.__dict__.get("shape")
        if shapes[0] is shapes[1] or (all(shapes) and shapes[0].values == shapes[1].values):
            return left, right
        return broadcast(self, left, right)

    monkeypatch.setattr(TritonSemantic, "cast", cast_others)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)
    monkeypatch.setattr(
        core.dtype, "__eq__", lambda self, other: self is other or is_equal(self, other)
    )


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
    """The interpreter is slow, and computes padding with NumPy, which warns; a GPU does not."""
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


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
