"""The verbs of a node are few, and each is defined where it is done: no layer repeats them all."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "luceasync"
ROOMS = ("host_cache", "prefix_cache", "pipeline", "backend", "ipc")  # where nodes are
VERBS = {"save", "restore", "drop", "drop_state", "export", "check", "adopt", "node_bytes"}
VERBS |= {"saved", "settled", "settle"}  # nobody is asked again and again
MOST = 20


def definitions(root: Path) -> list[str]:
    """Every method named as a verb, protocols too: "room/module.py: Class.verb"."""
    return [
        f"{path.relative_to(root)}: {owner.name}.{method.name}"
        for room in ROOMS
        for path in sorted((root / room).rglob("*.py"))
        for owner in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in VERBS
    ]


def test_node_verbs_have_few_definitions() -> None:
    found = definitions(PACKAGE)
    assert len(found) <= MOST, found


def test_none_is_missed(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    source = "class Stage:\n def save(self): ...\n def saved(self): ...\n def prefill(self): ..."
    (tmp_path / "pipeline" / "stage.py").write_text(source, encoding="utf-8")
    assert definitions(tmp_path) == [
        "pipeline/stage.py: Stage.save",
        "pipeline/stage.py: Stage.saved",
    ]
