"""How many values JSON text holds, told before any of them is made.

Owns the counting. Knows no field, and not whether the text is JSON at all.
"""

from __future__ import annotations

MAX_VALUES = 2**17  # of a body: with more, decoding alone holds up everybody


def has_too_many_values(body: bytes, most: int = MAX_VALUES) -> bool:
    """Whether `body` holds more than about `most` values.

    Text is looked at for what separates values, and first as it stands: that is enough for nearly
    all bodies, for what stands within strings can only make it seem more. The work is that of a few
    searches, however many values there are.
    """
    if _num_separators(body) <= most:
        return False
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")  # no quote is left within a string
    if bare.count(b'"') > 4 * (most + 1):  # a name and a value have two each
        return True
    return _num_separators(b"".join(bare.split(b'"')[::2])) > most


def _num_separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")
