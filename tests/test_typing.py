"""What the type checker is told to let pass is checked here: only kernels may be untyped."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("luceasync/kernels", "cuda")
COMPILED = {"kernel", "triton.jit", "gluon.jit", "cuda.jit"}
# Plain functions that a kernel takes in: their types are those of the device.
TAKEN_IN = "_same|_fp32_to_fp32|_bf16_to_fp32|_fp16_to_fp32|_fp32_to_bf16|_fp32_to_fp16".split("|")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_compiled(function: Function) -> bool:
    names = {ast.unparse(getattr(each, "func", each)) for each in function.decorator_list}
    return bool(names & COMPILED) or function.name in TAKEN_IN


def is_typed(function: Function) -> bool:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    arguments += [rest for rest in (given.vararg, given.kwarg) if rest]
    return function.returns is not None and all(
        argument.annotation or argument.arg in ("self", "cls") for argument in arguments
    )


def untyped_functions(source: str) -> list[str]:
    """Names of functions that no kernel is, and that lack a type."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, Function)]
    return [each.name for each in functions if not is_compiled(each) and not is_typed(each)]


def test_functions_that_launch_kernels_are_typed() -> None:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {path.name: untyped_functions(path.read_text(encoding="utf-8")) for path in paths}
    assert len(paths) > 10
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def attend(x: Tensor, n): ...", ["attend"]),
        ("def attend(x: Tensor): ...", ["attend"]),
        ("def attend(x: Tensor, *more) -> None: ...", ["attend"]),
        ("@triton.jit\ndef kernel(x, N: tl.constexpr): ...", []),
        ("@triton.jit(do_not_specialize=['n'])\ndef kernel(x, n): ...", []),
        ("@kernel()\ndef _add_kernel(x, n): ...", []),
        ("class Launcher:\n    def launch(self, x: Tensor) -> None: ...", []),
    ],
)
def test_a_function_without_a_type_is_caught(source: str, names: list[str]) -> None:
    assert untyped_functions(source) == names


def test_each_compiled_module_has_types_and_both_have_the_same_names() -> None:
    import importlib

    sources = sorted((ROOT / "cyext").glob("*.pyx"))
    assert [path.with_suffix(".pyi").is_file() for path in sources] == [True] * len(sources)
    for path in sources:
        stub = ast.parse(path.with_suffix(".pyi").read_text(encoding="utf-8"))
        module = importlib.import_module(f"luceasync.cyext.{path.stem}")
        for node in stub.body:
            if isinstance(node, ast.FunctionDef):
                given = [argument.arg for argument in node.args.args]
                assert given == arguments_of(path, node.name), f"{path.stem}.{node.name}"
            elif isinstance(node, ast.AnnAssign):
                assert hasattr(module, ast.unparse(node.target))


def arguments_of(source: Path, name: str) -> list[str]:
    """Names of the arguments of a function as its .pyx has them."""
    text = source.read_text(encoding="utf-8")
    inside = text.split(f"\ndef {name}(", maxsplit=1)[1].split(")", maxsplit=1)[0]
    words = [argument.split(":")[0].split("=")[0] for argument in inside.split(",")]
    return [word.removesuffix(" not None").split()[-1] for word in words]
