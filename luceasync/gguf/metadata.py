"""The keys and values of a GGUF header: typed access, decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import unpack_from

from luceasync.errors import ModelError
from luceasync.gguf.cursor import ARRAY, SCALARS, STRING, U32, U64, Cursor, text_of

INTEGERS = {0, 1, 2, 3, 4, 5, 10, 11}
REALS = {6, 12}
WORD_CHARS = 80
WORDS = {STRING: "a string", ARRAY: "an array", 7: "a bool", 6: "a float", 12: "a double"}


@dataclass(frozen=True, slots=True)
class Value:
    """Where a value lies. `num_items` None: no array, and `kind` is the value's own type."""

    kind: int
    begin: int
    num_items: int | None


class Metadata:
    """What a header says about a model. A key that is missing, or holds what it should not, is a
    ModelError that names it.
    """

    def __init__(self, cursor: Cursor, num_keys: int) -> None:
        """Step over so many keys. Raises ModelError."""
        self._view = cursor.view
        self._values: dict[str, Value] = {}
        for i in range(num_keys):
            key = cursor.name(f"key {i}")
            if key in self._values:
                raise ModelError(f"the key {key!r} is there twice")
            self._values[key] = _value(cursor, key)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def keys(self) -> list[str]:
        """All of them, in their order."""
        return list(self._values)

    def text(self, key: str) -> str:
        """A string."""
        value = self._found(key)
        if value.num_items is not None or value.kind != STRING:
            raise ModelError(f"{key} is {_words(value)}; a string is expected")
        [content] = self._strings(value.begin, 1)
        return text_of(content, key)

    def word(self, key: str) -> str:
        """A short string, such as can be told to a person."""
        word = self.text(key)
        if len(word) > WORD_CHARS:
            raise ModelError(f"{key} has {len(word)} characters; a word is expected")
        return word

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number, 0 or more."""
        if default is not None and key not in self:
            return default
        number = self._scalar(key, INTEGERS, "an integer")
        if number < 0:
            raise ModelError(f"{key} = {number:g}: 0 or more is expected")
        return int(number)

    def real(self, key: str, default: float | None = None) -> float:
        """A number."""
        if default is not None and key not in self:
            return default
        return float(self._scalar(key, REALS | INTEGERS, "a number"))

    def flag(self, key: str, default: bool) -> bool:
        """A truth value."""
        return bool(self._scalar(key, {7}, "a bool")) if key in self else default

    def is_array(self, key: str) -> bool:
        """Whether the value is a list of values."""
        return self._found(key).num_items is not None

    def integers(self, key: str) -> tuple[int, ...]:
        """The whole numbers of an array."""
        value = self._found(key)
        if value.num_items is None or value.kind not in INTEGERS | {7}:
            raise ModelError(f"{key} is {_words(value)}; an array of integers is expected")
        code = SCALARS[value.kind].format
        return unpack_from(f"<{value.num_items}{code[1:]}", self._view, value.begin)

    def strings(self, key: str) -> list[str]:
        """The strings of an array."""
        value = self._found(key)
        if value.num_items is None or value.kind != STRING:
            raise ModelError(f"{key} is {_words(value)}; an array of strings is expected")
        contents = self._strings(value.begin, value.num_items)
        return [text_of(content, f"an entry of {key}") for content in contents]

    def _found(self, key: str) -> Value:
        value = self._values.get(key)
        if value is None:
            raise ModelError(f"the key {key!r} is missing")
        return value

    def _scalar(self, key: str, kinds: set[int], expected: str) -> float:
        value = self._found(key)
        if value.num_items is not None or value.kind not in kinds:
            raise ModelError(f"{key} is {_words(value)}; {expected} is expected")
        number: float = SCALARS[value.kind].unpack_from(self._view, value.begin)[0]
        return number

    def _strings(self, begin: int, num_strings: int) -> list[bytes]:
        found, view, unpack = [], self._view, U64.unpack_from
        for _ in range(num_strings):
            end = begin + U64.size + unpack(view, begin)[0]
            found.append(view[begin + U64.size : end])
            begin = end
        return found


def _value(cursor: Cursor, key: str) -> Value:
    """Step over one value."""
    kind = cursor.number(U32, f"the type of {key}")
    if kind != ARRAY:
        begin = cursor.at
        if kind == STRING:
            cursor.take(cursor.number(U64, key), key)
        else:
            cursor.take(_size(kind, key), key)
        return Value(kind, begin, None)
    kind = cursor.number(U32, f"the type of {key}")
    if kind == STRING:
        num_items = cursor.count(U64.size, f"strings of {key}")
        begin = cursor.at
        cursor.skip_strings(num_items, key)
        return Value(kind, begin, num_items)
    size = _size(kind, key)
    num_items = cursor.count(size, f"entries of {key}")
    return Value(kind, cursor.take(num_items * size, key), num_items)


def _size(kind: int, key: str) -> int:
    code = SCALARS.get(kind)
    if code is None:
        what = "an array of arrays" if kind == ARRAY else f"of the unknown type {kind}"
        raise ModelError(f"{key} is {what}; a number, a bool, a string or an array is expected")
    return code.size


def _words(value: Value) -> str:
    kind = WORDS.get(value.kind, "an integer")
    return kind if value.num_items is None else f"an array whose entries are {kind} each"


def agreed(
    metadata: Metadata, key: str, num_layers: int, fits: Callable[[int], bool] = bool
) -> int | None:
    """A number that is one for all layers, or is told for each of them: then the one of those that
    fit. None where none does. Raises ModelError where they differ.
    """
    if not metadata.is_array(key):
        return metadata.integer(key)
    numbers = metadata.integers(key)
    if len(numbers) < num_layers:
        raise ModelError(f"{key} has {len(numbers)} entries; one a layer, {num_layers} is expected")
    found = {number for number in numbers[:num_layers] if fits(number)}
    if len(found) > 1:
        raise ModelError(f"{key} = {sorted(found)}: the same in all layers is expected")
    return found.pop() if found else None
