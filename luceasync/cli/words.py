"""Sizes, ages and faults in words for a person. Knows nothing of what they are of."""

from __future__ import annotations

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


def size_text(num_bytes: int) -> str:
    """Bytes for a person: `1536` -> "1.5 KiB"."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def age_text(seconds: float) -> str:
    """How long ago something was: `7300` -> "2 h ago"."""
    if seconds < MINUTE_S:
        return "now"
    if seconds < HOUR_S:
        return f"{seconds // MINUTE_S:.0f} min ago"
    if seconds < 2 * DAY_S:
        return f"{seconds // HOUR_S:.0f} h ago"
    return f"{seconds // DAY_S:.0f} days ago"


def one_line(text: object) -> str:
    """What an error says, whatever names are in it: `"a\nb"` -> "a\\nb". A terminal obeys none of
    their bytes.
    """
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in str(text))
