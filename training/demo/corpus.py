"""The facts: every documented public name of the standard library, and the answers about it.

Owns which names count and how a docstring becomes an answer. Reads only the running interpreter:
another Python version gives another corpus.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import pkgutil
import re
import sys
import warnings
from dataclasses import dataclass
from types import ClassMethodDescriptorType, ModuleType
from typing import Any

# Duplicates of other modules, modules that act when imported, and those that need Tk or Windows.
SKIPPED_MODULES = frozenset(
    "antigravity distutils ensurepip idlelib lib2to3 msilib nt ntpath posix pydoc_data sre_compile "
    "sre_constants sre_parse test this tkinter turtle turtledemo".split()
)
SHOWN_AS = {"posixpath": "os.path"}

MIN_DOC_CHARS = 20
MAX_PART_CHARS = 480
MAX_SIGNATURE_CHARS = 200


@dataclass(frozen=True, slots=True)
class Item:
    """One public name: `name` as it is usually written (`json.dumps`), `owner` its module or class.

    `signature` is empty if Python has none. `parts` is the docstring in order, in pieces short
    enough for one answer.
    """

    name: str
    kind: str
    owner: str
    signature: str
    parts: tuple[str, ...]

    @property
    def answer(self) -> str:
        """The answer to a question about the name."""
        return f"`{self.name}{self.signature}`\n\n{self.parts[0]}"


@dataclass(frozen=True, slots=True)
class Corpus:
    """All items in a fixed order, the members of each module, and the modules that failed to
    import.
    """

    items: tuple[Item, ...]
    members: dict[str, tuple[str, ...]]
    unimportable: tuple[str, ...]


def collect(only_modules: frozenset[str] | None = None) -> Corpus:
    """Read the standard library of the running interpreter, always with the same result.
    `only_modules` restricts the top-level modules, for a smoke run.
    """
    items: dict[str, Item] = {}
    members: dict[str, tuple[str, ...]] = {}
    unimportable: list[str] = []
    seen: set[int] = set()
    for module_name in _module_names(only_modules):
        module = _import(module_name)
        if module is None:
            unimportable.append(module_name)
            continue
        shown_as = SHOWN_AS.get(module_name, module_name)
        found = _items_of_module(module, shown_as, seen)
        for item in found:
            items.setdefault(item.name, item)
        names = tuple(item.name for item in found if item.kind in ("class", "function"))
        if names:
            members[shown_as] = names
    return Corpus(tuple(items.values()), members, tuple(unimportable))


def _module_names(only_modules: frozenset[str] | None) -> list[str]:
    """Dotted names, builtins first (others re-export them), packages before their parts."""
    names = ["builtins"]
    for top in sorted(sys.stdlib_module_names - SKIPPED_MODULES):
        if top.startswith("_") or top == "builtins" or (only_modules and top not in only_modules):
            continue
        names.append(top)
        # The codecs of `encodings` are about a hundred copies of the same few classes.
        package = _import(top) if top != "encodings" else None
        for part in sorted(m.name for m in pkgutil.iter_modules(getattr(package, "__path__", ()))):
            if not part.startswith("_") and part not in ("test", "tests"):
                names.append(f"{top}.{part}")
    return names


def _import(name: str) -> ModuleType | None:
    """The module, or None if this platform lacks it. Its output is dropped."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except (Exception, SystemExit):
        return None


def _items_of_module(module: ModuleType, shown_as: str, seen: set[int]) -> list[Item]:
    found = [_item(shown_as, "module", "", module)]
    prefix = "" if shown_as == "builtins" else f"{shown_as}."
    # `__all__` may name attributes that the module imports lazily.
    for key in sorted({*vars(module), *getattr(module, "__all__", ())}):
        value = getattr(module, key, None)
        if key.startswith("_") or id(value) in seen or not _is_public_here(module, key, value):
            continue
        seen.add(id(value))
        kind = "class" if inspect.isclass(value) else "function"
        found.append(_item(prefix + key, kind, shown_as, value))
        if kind == "class":
            found.extend(_items_of_class(value, prefix + key))
    return [item for item in found if item is not None]


def _is_public_here(module: ModuleType, key: str, value: Any) -> bool:
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return False
    home = getattr(value, "__module__", None) or module.__name__
    if hasattr(module, "__all__"):
        return key in module.__all__ or home == module.__name__
    return home == module.__name__ or home.startswith((f"{module.__name__}.", "_"))


def _items_of_class(cls: type, name: str) -> list[Item | None]:
    found = []
    for key, value in sorted(vars(cls).items()):
        if key.startswith("_"):
            continue
        inner = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(inner, property):
            found.append(_item(f"{name}.{key}", "property", name, inner))
        elif inspect.isroutine(inner):
            found.append(_item(f"{name}.{key}", "method", name, inner))
    return found


def _item(name: str, kind: str, owner: str, value: Any) -> Item | None:
    """The item, or None if the object has no useful docstring of its own."""
    own_doc = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    if not isinstance(own_doc, str):
        return None
    doc = inspect.cleandoc(own_doc).strip()
    if len(doc) < MIN_DOC_CHARS or " at 0x" in doc:
        return None
    signature = _signature(value) if kind not in ("module", "property") else ""
    return Item(name, kind, owner, signature, split_doc(doc))


def _signature(value: Any) -> str:
    """`(a, b=1)` without self or cls, shortened to `(...)` if it would fill the answer."""
    try:
        signature = inspect.signature(value)
    except Exception:  # besides ValueError, text signatures of C modules raise various errors
        return ""
    parameters = list(signature.parameters.values())
    # Class methods written in C include the class itself, and call it `type`.
    if parameters and (
        parameters[0].name in ("self", "cls") or type(value) is ClassMethodDescriptorType
    ):
        parameters = parameters[1:]
    text = str(signature.replace(parameters=parameters))
    # An address differs between runs: such a default cannot be learnt.
    return text if len(text) <= MAX_SIGNATURE_CHARS and " at 0x" not in text else "(...)"


def split_doc(doc: str) -> tuple[str, ...]:
    """Cut a docstring into at most two parts of MAX_PART_CHARS, at paragraphs where possible."""
    first, rest = _cut(doc)
    if not rest:
        return (first,)
    return first, _cut(rest)[0]


def _cut(text: str) -> tuple[str, str]:
    if len(text) <= MAX_PART_CHARS:
        return text, ""
    window = text[: MAX_PART_CHARS + 1]
    ends = [
        [m.start() for m in re.finditer(r"\n\s*\n", window)],
        [m.end() for m in re.finditer(r"\.(?=\s)", window)],
        [m.start() for m in re.finditer(r"\s", window)],
    ]
    end = next((e[-1] for e in ends if e and e[-1] >= MIN_DOC_CHARS), MAX_PART_CHARS)
    return text[:end].rstrip(), text[end:].strip()
