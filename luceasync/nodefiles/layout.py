"""What a node's files hold, in which order, and what of it belongs to the node's end alone.

Owns dtypes, sizes and the parts that tensor names stand for. Knows no header and no file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from luceasync.cyext.names import parse_name

TOKENS = "tokens"
TOKEN_DTYPE = "I32"

# Of a layer's tensors those kinds that belong to a node's end; the model's layers say which.
EndKinds = frozenset[str]

ITEM_BYTES = {  # the dtypes of safetensors whose items are whole bytes
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


class Part(StrEnum):
    """What a tensor is needed for. All but the span belong to the node's end, and can be left out
    where another node follows.
    """

    SPAN = "span"  # the tokens and what each of them left behind
    STATE = "state"
    LOGITS = "logits"
    FEATURES = "features"
    LEDGER = "ledger"  # which chunks were on the devices, and what they were worth


class Half(StrEnum):
    """A node is two files: one is written once and never again, the other comes and goes.

    That of the rows may hold the end too: so it was before ends had files of their own.
    """

    ROWS = "rows"  # the tokens, and what each of them left behind: rows, features
    END = "end"  # what is true at the last token alone


END_PARTS = frozenset((Part.STATE, Part.LOGITS, Part.LEDGER))  # what the file of an end holds


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor to be written: dtype as safetensors spells it, `checksum` of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's bytes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """A tensor and the bytes `[begin, end)` of the file that hold it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    xxh3_128: str


def part_of(name: str, end_kinds: EndKinds) -> Part:
    """What the tensor of that name belongs to; the span, where the name says nothing else."""
    if name == "snap_prefill_logits":
        return Part.LOGITS
    if name == "kvflash_ledger":
        return Part.LEDGER
    if name.startswith("dflash_feature_"):
        return Part.FEATURES
    try:
        _, kind, _ = parse_name(name)
    except ValueError:  # no tensor of a layer
        return Part.SPAN
    return Part.STATE if kind in end_kinds else Part.SPAN


def file_order(entries: Iterable[TensorEntry], end_kinds: EndKinds) -> list[TensorEntry]:
    """The entries in the order of a file: the tokens, the rest of the span, and the end.

    safetensors allows no holes. Within the span and within the end, sizes fall by the power of two
    that divides them, at most 64: where those of the span are multiples of 64, each tensor begins
    at a multiple of its own, however many tokens there are.
    """

    def place(entry: TensorEntry) -> tuple[bool, bool, int]:
        is_end = part_of(entry.name, end_kinds) is not Part.SPAN
        return is_end, entry.name != TOKENS, -math.gcd(entry.num_bytes, 64)

    return sorted(entries, key=place)
