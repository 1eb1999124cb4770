"""A kind of layer is named in its own files, and in those of the families that have it.

What a kind keeps is read by everybody else as data: no name of a kind, of its state or of its
sizes stands elsewhere. A test at the end shows that the checker sees what breaks the rule.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "luceasync"

# The drafter is a network of its own: its layers are of one kind, which it shares. What the API
# calls a delta is none of these. Benches measure kernels one by one, and write configs.
AT_HOME = (
    "cli/",
    "server/",
    "models/mixers/",
    "models/feed_forward/",
    "models/families/",
    "gguf/layout.py",
    "kernels/",
    "speculation/dflash/",
    "bench/serve_beside.py",
    "bench/kernels.py",
    "bench/shapes.py",
)
MODULES = {
    f"luceasync.models.{room}.{kind}"
    for room, kinds in {
        "mixers": ("attention", "delta", "gated_delta", "sliding"),
        "feed_forward": ("dense", "experts", "geglu", "geglu_experts"),
    }.items()
    for kind in kinds
}
WORDS = {"attention", "delta", "sliding", "attn_k", "attn_v", "conv", "window_k", "window_v"}
WORDS |= {"linear_attention", "full_attention", "sliding_attention"}


def strange_words(path: Path) -> Iterator[str]:
    """Imports of a kind's files, and texts that are a kind's name or that of its state."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = re.sub("_(torch|triton|compiled|sizes)$", "", node.module)
            if module in MODULES:
                yield f"{path.name}:{node.lineno}: imports {node.module}"
        elif isinstance(node, ast.Constant) and node.value in WORDS:
            yield f"{path.name}:{node.lineno}: {node.value!r}"


def breaches(root: Path) -> list[str]:
    return [
        words
        for path in sorted(root.rglob("*.py"))
        if not path.relative_to(root).as_posix().startswith(AT_HOME)
        for words in strange_words(path)
    ]


def test_kinds_of_layers_are_named_in_their_own_files_alone() -> None:
    assert breaches(ROOT) == []


@pytest.mark.parametrize(
    "line",
    [
        "from luceasync.models.mixers.attention import AttentionSpec",
        "from luceasync.models.mixers.delta_triton import TritonDelta",
        "kinds.count('delta')",
        "STATE_KINDS = ('conv', 'delta')",
    ],
)
def test_a_file_that_names_one_is_caught(tmp_path: Path, line: str) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "cache.py").write_text(line)
    assert breaches(tmp_path)
    (tmp_path / "models" / "families").mkdir(parents=True)
    (tmp_path / "kv" / "cache.py").rename(tmp_path / "models" / "families" / "new.py")
    assert not breaches(tmp_path)
