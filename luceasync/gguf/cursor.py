"""Steps through the bytes of a header. Never goes beyond their end, and allocates nothing for what
a file only claims to have.
"""

from __future__ import annotations

from mmap import mmap
from struct import Struct

from luceasync.errors import ModelError

U32, U64 = Struct("<I"), Struct("<Q")
# Scalar types of metadata by their numbers; 8 is a string, 9 an array.
SCALARS = {
    0: Struct("<B"),
    1: Struct("<b"),
    2: Struct("<H"),
    3: Struct("<h"),
    4: U32,
    5: Struct("<i"),
    6: Struct("<f"),
    7: Struct("<?"),
    10: U64,
    11: Struct("<q"),
    12: Struct("<d"),
}
STRING, ARRAY = 8, 9
NAME_BYTES = 1 << 10  # a key or a tensor's name; real ones have less than a hundred
MAX_STRINGS = 1 << 23  # of all arrays: the largest vocabularies have half a million, merges and all


class Cursor:
    """At `at` of the bytes of a file. All raise ModelError at what is not there."""

    def __init__(self, view: mmap | bytes) -> None:
        self.view = view
        self.at = 0
        self._strings_left = MAX_STRINGS

    def take(self, num_bytes: int, what: str) -> int:
        """Step over so many bytes; where they begin."""
        begin, there = self.at, len(self.view) - self.at
        if num_bytes > there:
            raise ModelError(
                f"cut in its header: {there} bytes are there for {what}, {num_bytes} are expected"
            )
        self.at += num_bytes
        return begin

    def number(self, code: Struct, what: str) -> int:
        """One whole number."""
        value: int = code.unpack_from(self.view, self.take(code.size, what))[0]
        return value

    def count(self, least_bytes: int, what: str) -> int:
        """How many entries follow, each of at least so many bytes."""
        value = self.number(U64, f"the number of {what}")
        there = len(self.view) - self.at
        if value * least_bytes > there:
            raise ModelError(
                f"cut in its header: {there} bytes are there for {value} {what}, "
                f"at least {value * least_bytes} are expected"
            )
        return value

    def name(self, what: str) -> str:
        """A short text that is used at once."""
        length = self.number(U64, what)
        if length > NAME_BYTES:
            raise ModelError(f"{what} has {length} bytes; at most {NAME_BYTES} are expected")
        begin = self.take(length, what)
        name = text_of(self.view[begin : begin + length], what)
        if not name.isprintable():
            raise ModelError(f"{what} is {name!r}; printable characters are expected")
        return name

    def skip_strings(self, num_strings: int, what: str) -> None:
        """Step over so many strings."""
        self._strings_left -= num_strings
        if self._strings_left < 0:
            raise ModelError(
                f"{what} has {num_strings} strings; at most {MAX_STRINGS} are expected in all"
            )
        view, at, unpack, last = self.view, self.at, U64.unpack_from, len(self.view) - U64.size
        for _ in range(num_strings):
            if at > last:
                break
            at += U64.size + unpack(view, at)[0]
        else:
            if at <= len(view):
                self.at = at
                return
        there = len(view) - self.at
        raise ModelError(
            f"cut in its header: {there} bytes are there for {num_strings} strings of {what}, "
            "and they go on"
        )


def text_of(content: bytes, what: str) -> str:
    """UTF-8. Raises ModelError."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{what} is not UTF-8 text: {error}") from None
