"""Imports run downwards only, in no circle, and what answers --help or HTTP loads no torch.

An import within a function, or for types alone, counts too: it does not break a circle.

The tables are the rules; a test at the end shows that the checker sees what breaks them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"luceasync.cuda": "cuda", "luceasync.cyext": "cyext", "luceasync": "luceasync"}

# Open to all but the leaves; they import the standard library and each other.
OPEN = {
    "config",
    "errors",
    "nodes",
    "options",
    "server_config",
    "parsers",
    "process_memory",
    "request",
}
OPEN |= {"status"}
LEAVES = {"kernels", "cuda", "cyext"}  # they import nothing of ours

# Which of our packages, or of their modules, a package may import besides itself and OPEN.
MAY_IMPORT = {
    "local": {"engine", "server", "models.files", "disk_cache.directory"},
    "server": set(),
    "engine": {"prefix_cache", "text", "speculation", "pipeline", "ranking", "grammar"}
    | {"cyext.copies"}
    | {"host_cache.arena", "kv.pages", "models.files", "models.directory", "models.spec"}
    | {"disk_cache.directory", "disk_cache.disk", "disk_cache.object_store", "disk_cache.upkeep"},
    "prefix_cache": {"prefix_tree", "disk_cache", "host_cache", "kv.pages", "pipeline.paging"}
    | {"text.history", "text.prompt"}
    | {"models.spec", "models.families", "models.formats", "models.precision"},
    "backend": {"ipc", "pipeline", "host_cache", "kv", "ranking", "models", "speculation"},
    "speculation": {"pipeline", "ranking", "models", "kv", "ipc", "host_cache", "cuda", "gguf"}
    | {"kernels", "cyext.copies"},
    "bench": {"engine", "prefix_cache", "text", "disk_cache", "host_cache", "speculation"}
    | {"pipeline", "models", "kv", "cyext", "ranking", "kernels", "ipc", "server"},
    "prefix_tree": {"cyext"},
    "disk_cache": {"cyext"},
    "pipeline": {"models", "host_cache", "ranking", "kv", "ipc", "cuda.launch", "cyext.flatten"}
    | {"kernels.kernel", "kernels.best_token", "kernels.highest_tokens"},
    "models": {"kv.state", "gguf"} | LEAVES,
    "host_cache": {"kv"} | LEAVES,
    "kv": LEAVES,
    "ranking": {"models.trees"},
    "text": {"cyext", "gguf"},
    "grammar": {"text"},
    "gguf": set(),
    "ipc": {"cyext"},
    "cluster": {"ipc.ray_launcher", "engine.start", "server.app", "models.files"}
    | {"disk_cache.directory"},
}

# API families; the common part of the server knows none of them, and none knows another.
FAMILIES = {"server.openai", "server.anthropic", "server.ollama"}
COMPOSES_FAMILIES = "luceasync.server.app"

# Importing these loads none of HEAVY, not even through other modules of ours.
HEAVY = {"torch", "numpy", "numba", "triton", "transformers"}
LIGHT = OPEN | {"server", "text", "cli.app", "pipeline.plan", "pipeline.shard_plan"}
LIGHT |= {"pipeline.capacity", "pipeline.offer"}
LIGHT |= {"prefix_tree", "disk_cache", "kv.state", "kv.pages", "kv.pager", "kv.residency"}
LIGHT |= {"models.files", "models.directory"}
LIGHT |= {"gguf", "models.gguf_model", "models.quant.encoding", "models.quant.ggml"}
LIGHT |= {"models.precision", "speculation.dflash.draft_config", "ipc"}
LIGHT_ALONE = {"cli"}  # what these modules themselves import at their top


@dataclass(frozen=True)
class Import:
    """`name` as written or, from our packages, the module it means; lazy: not at import time."""

    name: str
    lazy: bool


Tree = dict[str, list[Import]]


@cache
def read_tree(root: Path) -> Tree:
    """Every module of ours under `root` and what it imports."""
    paths = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = [package, *path.relative_to(root / folder).with_suffix("").parts]
            paths[".".join(parts).removesuffix(".__init__")] = path
    return {
        module: [
            Import(meant(name, set(paths)), lazy)
            for name, lazy in written_imports(ast.parse(path.read_text(encoding="utf-8")))
        ]
        for module, path in paths.items()
    }


def written_imports(node: ast.AST, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """(dotted name, lazy) of each import; `from a import b` gives "a.b"."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            start = child.module if child.level == 0 else "relative"
            yield from ((f"{start}.{alias.name}", lazy) for alias in child.names)
        else:
            later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            )
            yield from written_imports(child, lazy or later)


def meant(name: str, modules: set[str]) -> str:
    """The module of ours that `name` is or lies in, or `name` where it is not ours."""
    if name.split(".", maxsplit=1)[0] != "luceasync":
        return name
    return name if name in modules else name.rpartition(".")[0]


def covers(prefixes: set[str], module: str) -> bool:
    """Whether `module`, "luceasync.models.spec", lies in one of `prefixes`, "models"."""
    inner = module.removeprefix("luceasync.")
    return any(inner == prefix or inner.startswith(prefix + ".") for prefix in prefixes)


def upward_imports(tree: Tree) -> list[str]:
    """Imports that MAY_IMPORT does not allow, lazy ones too, as sentences."""
    found = []
    for module, imports in tree.items():
        package = module.removeprefix("luceasync").lstrip(".").split(".")[0]
        if package in ("", "__main__", "cli"):
            continue
        if package not in MAY_IMPORT and package not in OPEN | LEAVES:
            found.append(f"{module} has no rule in this test")
            continue
        allowed = (
            {package} if package in LEAVES else {package} | OPEN | MAY_IMPORT.get(package, set())
        )
        found += [
            f"{module} must not import {name}"
            for name in (entry.name for entry in imports)
            if name.startswith("luceasync.") and not covers(allowed, name)
        ]
        found += [
            f"{module}: write the full name" for e in imports if e.name.startswith("relative")
        ]
    return found


def circles(tree: Tree) -> list[str]:
    """Modules, and packages, that come to need themselves, by whatever import: each circle once, as
    a way.
    """
    rooms: dict[str, set[str]] = {}
    for module, imports in tree.items():
        ours = {entry.name for entry in imports if entry.name.startswith("luceasync.")}
        rooms.setdefault(room(module), set()).update({room(name) for name in ours} - {room(module)})
    needed = {
        module: {entry.name for entry in imports if entry.name in tree}
        for module, imports in tree.items()
    }
    return [*circles_of(needed), *circles_of(rooms)]


def room(module: str) -> str:
    """The package of ours in which the module lies: "luceasync.models"."""
    return ".".join(module.split(".")[:2])


def circles_of(graph: dict[str, set[str]]) -> list[str]:
    """Follows every edge once; an edge to what is being followed closes a circle."""
    found: list[str] = []
    done: set[str] = set()

    def follow(name: str, way: tuple[str, ...]) -> None:
        if name in way:
            found.append(" -> ".join((*way[way.index(name) :], name)))
        elif name not in done:
            for each in sorted(graph.get(name, ())):
                follow(each, (*way, name))
            done.add(name)

    for name in sorted(graph):
        follow(name, ())
    return found


def heavy_imports(tree: Tree) -> list[str]:
    """Modules of LIGHT that load something HEAVY when imported, with the way to it."""
    found = []
    for module in tree:
        if covers(LIGHT, module):
            found += [" -> ".join(way) for way in ways_to_heavy(tree, (module,))]
        elif covers(LIGHT_ALONE, module):
            tops = {entry.name.split(".")[0] for entry in tree[module] if not entry.lazy}
            found += [f"{module} -> {top}" for top in sorted(tops & HEAVY)]
    return found


def ways_to_heavy(tree: Tree, way: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for entry in tree[way[-1]]:
        if entry.lazy or entry.name in way:
            continue
        if entry.name.split(".")[0] in HEAVY:
            yield (*way, entry.name)
        elif entry.name in tree:
            yield from ways_to_heavy(tree, (*way, entry.name))


def foreign_imports(tree: Tree) -> list[str]:
    """Imports of OPEN modules that are neither ours nor the standard library's."""
    own = sys.stdlib_module_names | {"luceasync"}
    return [
        f"{module} -> {entry.name}"
        for module in tree
        if covers(OPEN, module)
        for entry in tree[module]
        if entry.name.split(".")[0] not in own
    ]


def family_imports(tree: Tree) -> list[str]:
    """Imports of an API family by what is not of it."""
    return [
        f"{module} must not import {entry.name}"
        for module in tree
        if covers({"server"}, module) and module != COMPOSES_FAMILIES
        for entry in tree[module]
        for family in FAMILIES
        if covers({family}, entry.name) and not covers({family}, module)
    ]


def test_imports_run_downwards() -> None:
    assert upward_imports(read_tree(ROOT)) == []


def test_nothing_needs_itself() -> None:
    assert circles(read_tree(ROOT)) == []


def test_help_http_text_and_the_pure_decisions_load_no_torch() -> None:
    assert heavy_imports(read_tree(ROOT)) == []


def test_an_api_family_is_known_to_the_app_alone() -> None:
    assert family_imports(read_tree(ROOT)) == []


def test_the_words_that_all_share_need_the_standard_library_only() -> None:
    assert foreign_imports(read_tree(ROOT)) == []


def test_nothing_loads_torchs_compiler() -> None:
    """Importing it takes seconds, of every start on a GPU."""
    compiler = ("torch._dynamo", "torch._inductor", "torch.nn.attention.bias")
    tree = read_tree(ROOT)
    eager = [(m, e.name) for m in tree for e in tree[m] if not e.lazy]
    assert [pair for pair in eager if pair[1].startswith(compiler)] == []


def test_compiled_modules_import_nothing_of_ours() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in ROOT.glob("cyext/*.p[yx]*")}
    ours = re.compile(r"^\s*(from|c?import)\s+(luceasync|cyext|\.)", re.MULTILINE)
    assert [name for name, source in sources.items() if ours.search(source)] == []


@pytest.mark.parametrize(
    ("module", "line", "check", "words"),
    [
        ("kv/cache.py", "from luceasync.engine import pump", upward_imports, "luceasync.engine"),
        ("kv/cache.py", "def f():\n  import luceasync.server.app", upward_imports, "server.app"),
        ("engine/pump.py", "from luceasync.models import loader", upward_imports, "models"),
        ("prefix_cache/lease.py", "import luceasync.engine.pump", upward_imports, "engine.pump"),
        ("server/app.py", "from ..engine import pump", upward_imports, "full name"),
        (
            "kv/pages.py",
            "from luceasync.kv import state",
            circles,
            "-> luceasync.kv.state",
        ),
        ("kv/pages.py", "def f():\n  import luceasync.kv.state", circles, "-> luceasync.kv.state"),
        (
            "kv/pages.py",
            "if TYPE_CHECKING:\n  from luceasync.kv.state import Keeps",
            circles,
            "-> luceasync.kv.state",
        ),
        ("text/words.py", "def f():\n  import luceasync.prefix_tree.node", circles, "tree -> "),
        ("kernels/rows.py", "from luceasync import errors", upward_imports, "luceasync.errors"),
        ("junk/x.py", "", upward_imports, "luceasync.junk.x has no rule"),
        ("ipc/shared.py", "import numpy", heavy_imports, "luceasync.ipc.shared -> numpy"),
        (
            "ipc/shared.py",
            "from luceasync.kv import state",
            upward_imports,
            "must not import",
        ),
        ("server/app.py", "import torch", heavy_imports, "luceasync.server.app -> torch"),
        ("server/app.py", "import luceasync.mid", heavy_imports, "mid -> numpy.linalg"),
        ("cli/plan.py", "from torch import nn", heavy_imports, "cli.plan -> torch"),
        (
            "server/http/responses.py",
            "import luceasync.server.openai.chat_answer",
            family_imports,
            "openai.chat",
        ),
        ("errors.py", "import msgspec", foreign_imports, "luceasync.errors -> msgspec"),
    ],
)
def test_a_tree_that_breaks_a_rule_is_caught(tmp_path: Path, module, line, check, words) -> None:
    tree = {
        "mid.py": "import numpy.linalg",
        "engine/pump.py": "",
        "server/openai/chat_answer.py": "",
        "server/app.py": "",
        "kv/state.py": "from luceasync.kv import pages",
        "prefix_tree/node.py": "from luceasync.text import words",
        "text/words.py": "",
        "kv/pages.py": "",
        module: line,
    }
    for name, source in {"errors.py": "", "models/loader.py": "", **tree}.items():
        path = tmp_path / "luceasync" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    assert any(words in sentence for sentence in check(read_tree(tmp_path)))


def test_an_import_inside_a_function_may_be_heavy(tmp_path: Path) -> None:
    (tmp_path / "luceasync" / "cli").mkdir(parents=True)
    source = "def f():\n    import torch\n"
    (tmp_path / "luceasync" / "cli" / "app.py").write_text(source, encoding="utf-8")
    assert heavy_imports(read_tree(tmp_path)) == []
