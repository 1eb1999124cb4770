"""SentencePiece's merging (Kudo and Richardson, 2018) as it is told: of all neighbours that make up
a piece those of the highest score are merged, the first in the text if several have it.
"""

from __future__ import annotations

from collections.abc import Mapping

SPACE = "\u2581"


def pieces_of(text: str, scores: Mapping[str, float]) -> list[str]:
    """The pieces of `text`. Characters that are none become bytes."""
    parts = list(text.replace(" ", SPACE))
    while True:
        found = [
            (-scores[parts[i] + parts[i + 1]], i)
            for i in range(len(parts) - 1)
            if parts[i] + parts[i + 1] in scores
        ]
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [piece for part in parts for piece in _known(part, scores)]


def _known(part: str, scores: Mapping[str, float]) -> list[str]:
    return [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
