"""Modules and names of the package: modules that hold a whole subject each, none needlessly small
besides the rows of tables, and one class a name.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

from tests.test_imports import ROOT, read_tree

PACKAGE = ROOT / "luceasync"
MEAN_LINES = 200  # of a module; 120 when there were 522 modules
MIN_LINES = 80
# Rows of a table: each module is one entry of its package's table, however short it is.
TABLES = ("models/families", "models/mixers", "models/feed_forward", "models/formats")
TABLES += ("models/quant/checkpoints",)
# One is run by its path, the other imports Triton and is imported where a platform chose it.
ALONE = {"ipc/leash.py", "speculation/dflash/triton_draft_ops.py"}
CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)


def small_modules(root: Path) -> list[str]:
    """Modules below MIN_LINES lines with fewer than two importers outside their own folder."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, imports in read_tree(root).items():
        for entry in imports:
            importers[entry.name].add(module)
    package, found = root / "luceasync", []
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        if path.name.startswith("__") or name in ALONE or name.startswith(TABLES):
            continue
        module = "luceasync." + name.removesuffix(".py").replace("/", ".")
        folder = module.rpartition(".")[0]
        elsewhere = {user for user in importers[module] if user.rpartition(".")[0] != folder}
        if path.read_bytes().count(b"\n") < MIN_LINES and len(elsewhere) < 2:
            found.append(name)
    return found


def repeated_classes(root: Path) -> list[str]:
    """Public class names that more than one module of the package defines."""
    sources = (path.read_text(encoding="utf-8") for path in (root / "luceasync").rglob("*.py"))
    counts = Counter(name for source in sources for name in CLASS.findall(source))
    return sorted(name for name, count in counts.items() if count > 1)


def test_modules_are_few() -> None:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
    lines = [
        path.read_bytes().count(b"\n")
        for name, path in paths.items()
        if not name.startswith(TABLES) and path.name != "__init__.py"
    ]
    assert mean(lines) >= MEAN_LINES


def test_a_small_module_has_importers_elsewhere() -> None:
    assert small_modules(ROOT) == []


def test_a_public_class_name_exists_once() -> None:
    assert repeated_classes(ROOT) == []


def test_what_breaks_these_rules_is_found(tmp_path: Path) -> None:
    files = {
        "kv/pages.py": "class Page: ...",
        "kv/cache.py": "from luceasync.kv import pages\nclass Page: ...",
        "models/families/toy.py": "class Toy: ...",
    }
    for name, source in files.items():
        path = tmp_path / "luceasync" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert small_modules(tmp_path) == ["kv/cache.py", "kv/pages.py"]
    assert repeated_classes(tmp_path) == ["Page"]
