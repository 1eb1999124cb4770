"""A node is saved, restored, exported, adopted and dropped: the same verbs on every level."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "luceasync"
VERBS = ("save", "restore", "export", "adopt", "drop")
# From the prefix cache down to the memory of a shard, here or in another process.
LEVELS = {
    "prefix_cache/memory.py": {"MemoryNodes", "UnreadFeatures"},
    "host_cache/nodes.py": {"NodesInParts", "NodeStore"},
    "host_cache/shard_nodes.py": {"ShardContents"},
    "pipeline/remote/nodes.py": {"RemoteContents"},
    "speculation/dflash/feature_contents.py": {"DraftFeatures", "LocalFeatures"},
}
# What these acts were called on other levels once.
SYNONYMS = {"keep", "take_out", "take_up", "put_in", "named", "given", "let_go", "disown", "forget"}
ROOMS = ("prefix_cache", "host_cache", "pipeline/remote/nodes.py", "speculation/dflash")


def methods(path: Path) -> dict[str, set[str]]:
    """The methods of each class of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        owner.name: {
            method.name
            for method in owner.body
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
    }


def other_verbs(root: Path) -> list[str]:
    """Methods that are named by a synonym: "room/module.py: Class.method"."""
    paths = [path for room in ROOMS for path in ((root / room).rglob("*.py"))]
    paths += [root / room for room in ROOMS if room.endswith(".py") and (root / room).is_file()]
    return sorted(
        f"{path.relative_to(root)}: {owner}.{name}"
        for path in paths
        for owner, names in methods(path).items()
        for name in names & SYNONYMS
    )


def test_every_level_has_the_same_verbs() -> None:
    for name, owners in LEVELS.items():
        found = methods(PACKAGE / name)
        for owner in owners:
            assert found[owner].issuperset(VERBS), owner


def test_no_verb_has_a_synonym() -> None:
    assert other_verbs(PACKAGE) == []


def test_a_synonym_is_seen(tmp_path: Path) -> None:
    (tmp_path / "host_cache").mkdir()
    source = "class Lane:\n def save(self): ...\n def take_out(self): ..."
    (tmp_path / "host_cache" / "lane.py").write_text(source, encoding="utf-8")
    assert other_verbs(tmp_path) == ["host_cache/lane.py: Lane.take_out"]
