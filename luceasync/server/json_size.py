"""How many values JSON text holds, told before any of them is made.

Owns the counting. Knows no field, and not whether the text is JSON at all.
"""

from __future__ import annotations

from collections.abc import Iterator

MAX_VALUES = 2**17  # of a body: with more, decoding alone holds up everybody
PIECE_BYTES = 64 << 10  # looked at in one go: less than a millisecond, then others may run


def has_too_many_values(body: bytes, most: int = MAX_VALUES) -> bool:
    """Whether `body` holds more than `most` values.

    Text is looked at for what separates values, and first as it stands: that is enough for nearly
    all bodies, for what stands within strings can only make it seem more. The work is that of a few
    searches, however many values there are.
    """
    return _exceeds(map(_num_separators, _pieces(body)), most) and _exceeds(
        map(_num_separators, _outside_strings(body)), most
    )


def _exceeds(counts: Iterator[int], most: int) -> bool:
    total = 0
    for count in counts:
        total += count
        if total > most:
            return True
    return False


def _pieces(body: bytes) -> Iterator[bytes]:
    """`body` in pieces that end with no escape half done."""
    begin = 0
    while begin < len(body):
        piece = body[begin : begin + PIECE_BYTES]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_backslashes % 2 and len(piece) == PIECE_BYTES:
            piece = piece[:-1]
        yield piece
        begin += len(piece)


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """What of each piece stands in no string; a body that is no JSON may be seen otherwise."""
    is_inside = False
    for piece in _pieces(body):
        bare = piece.replace(rb"\\", b"").replace(rb"\"", b"")  # no quote is left within a string
        parts = bare.split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _num_separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
