"""Kernel tests run on the GPU where there is one, else in Triton's interpreter on the CPU."""

import pytest
import torch


@pytest.fixture(autouse=True)
def scalars_of_new_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy 2.4 no longer takes the interpreter's one-element arrays for loop bounds."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_index(tensor, scope) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_and_index)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter computes padding with numpy, which warns of what a GPU does silently."""
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=["fp32", "half"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """float32 and a half: bfloat16, but the interpreter multiplies float16 only."""
    if request.param == "fp32":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_available() else torch.float16
