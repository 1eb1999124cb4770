"""Which kind of device there is, is asked in the platform's room alone.

The room: the platforms and what they are made of, and the bodies that only GPUs have. Elsewhere a
platform, or what a device offers, is handed in.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "luceasync"

ROOM = {
    "pipeline/offer.py",
    "pipeline/platform.py",
    "pipeline/cpu_platform.py",
    "pipeline/gpu_platform.py",
    "pipeline/devices.py",
    "pipeline/capture.py",
    "pipeline/transfer.py",
    # Copies by a CPU and by a GPU, and pinned memory.
    "host_cache/arena.py",
    "host_cache/copy_stream.py",
    "host_cache/copies.py",
    "host_cache/gpu_copies.py",
    "host_cache/staging.py",
    # Clocks of devices, for measurements; one part runs under other checkouts' code.
    "bench/device.py",
    "bench/checkout.py",
}
ROOM_FOLDERS = ("kernels/", "cuda/")

KINDS = {"cpu", "gpu", "cuda", "hip"}
QUESTIONS = {"is_cuda", "is_cpu", "is_hip", "cuda"}  # x.is_cuda, torch.cuda, x.cuda()
BODIES = {"CpuPlatform", "CudaPlatform", "HipPlatform", "gpu_backend"}


def asked(source: str) -> list[str]:
    """Every place that asks for a kind of device, or does what only one kind can do."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if hasattr(node, "lineno") and _asks(node)
    ]


def _asks(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(ast.Attribute(attr="version"), "hip" | "cuda"):
            return True  # torch.version.hip
        case ast.Attribute(value, "type"):
            return ast.unparse(value).endswith("device")
        case ast.Attribute(attr=attr):
            return attr in QUESTIONS
        case ast.Compare(left, _, others):
            return any(_names_a_kind(part) for part in (left, *others))
        case ast.Call(ast.Attribute(attr="startswith"), [prefix]):
            return _names_a_kind(prefix)
        case ast.MatchValue(value):
            return _names_a_kind(value)
        case ast.Name(name) | ast.alias(name):
            return name in BODIES
    return False


def _names_a_kind(node: ast.AST) -> bool:
    """Whether it is a kind of device, "cpu:0" too, or a list with one in it."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    values = [part.value for part in parts if isinstance(part, ast.Constant)]
    return any(isinstance(value, str) and value.partition(":")[0] in KINDS for value in values)


def asked_outside(root: Path) -> dict[str, list[str]]:
    """By file, what is asked outside the room."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name not in ROOM and not name.startswith(ROOM_FOLDERS):
            found[name] = asked(path.read_text(encoding="utf-8"))
    return {name: lines for name, lines in found.items() if lines}


def test_kinds_of_devices_are_asked_in_the_platforms_room_alone():
    assert asked_outside(ROOT) == {}


def test_the_room_is_what_is_there():
    assert [name for name in sorted(ROOM) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    "line",
    [
        "if x.is_cuda: pass",
        "wait() if not q.is_cpu else None",
        "torch.cuda.current_stream(device).synchronize()",
        "def f(stream: torch.cuda.Stream): pass",
        "on_gpu = device.type != 'cpu'",
        "kind = self._device.type",
        "small = name.startswith('cpu')",
        "small = name.startswith(('cuda:', 'hip:'))",
        "if backend == 'hip': pass",
        "if backend in ('cuda', 'hip'): pass",
        "if torch.version.hip is None: pass",
        "match backend:\n  case 'cpu': pass",
        "if isinstance(platform, CpuPlatform): pass",
        "from luceasync.pipeline.gpu_platform import gpu_backend",
        "y = x.cuda()",
    ],
)
def test_a_file_that_asks_is_caught(tmp_path: Path, line: str):
    (tmp_path / "kernels").mkdir()
    for name in ("engine.py", "kernels/rows.py"):
        (tmp_path / name).write_text(f"import torch\n\n{line}\n", encoding="utf-8")
    assert list(asked_outside(tmp_path)) == ["engine.py"]


@pytest.mark.parametrize(
    "line",
    [
        "x = y.cpu()",
        "host = torch.device('cpu')",
        "if part.type != 'text': pass",
        "if tensor.device != self.device: pass",
        "names = ['cuda:0']",
        "has_bf16 = default_dtype(find_devices(['cpu'])) == 'bf16'",
    ],
)
def test_what_asks_for_no_kind_is_let_be(line: str):
    assert asked(line) == []
