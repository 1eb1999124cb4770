"""The metadata of a node, as the strings of a file's header.

Owns the fields and their valid values. Knows no tensor and no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from luceasync.errors import CorruptNode

MAX_TOKENS = 1 << 24  # 64 MiB of ids, far beyond any context
MAX_SPLIT_CHARACTERS = 4096
KEY = re.compile(r"[0-9a-f]{8,128}")
NUMBER = re.compile(r"0|[1-9][0-9]{0,14}")
FLAGS = {"yes": True, "no": False}
FIELDS = frozenset(
    ("namespace", "key", "parent", "begin", "end", "split", "created", "generated", "turn_end")
)


@dataclass(frozen=True, slots=True)
class NodeMetadata:
    """The metadata of the node of tokens `[begin, end)`.

    `key` and `parent` are lower-case hex, `parent` is empty under the root; `split`: the first
    layer of each shard that saved it; `created_s`: seconds since 1970. `generated`: the model wrote
    the tokens, so that history which comes back as text can be matched to them; `turn_end`: a turn
    ends with the last one.
    """

    namespace: str
    key: str
    parent: str
    begin: int
    end: int
    split: tuple[int, ...]
    created_s: int
    generated: bool
    turn_end: bool


def to_strings(metadata: NodeMetadata) -> dict[str, str]:
    """A string for each of FIELDS."""
    return {
        "namespace": metadata.namespace,
        "key": metadata.key,
        "parent": metadata.parent,
        "begin": str(metadata.begin),
        "end": str(metadata.end),
        "split": ",".join(map(str, metadata.split)),
        "created": str(metadata.created_s),
        "generated": "yes" if metadata.generated else "no",
        "turn_end": "yes" if metadata.turn_end else "no",
    }


def from_strings(strings: Mapping[str, str]) -> NodeMetadata:
    """The inverse of `to_strings`. Raises CorruptNode for strings that it never makes."""
    begin, end = _number(strings, "begin"), _number(strings, "end")
    if not begin < end <= MAX_TOKENS:
        raise CorruptNode(f"tokens [{begin}, {end}): expected begin < end <= {MAX_TOKENS}")
    parent = strings["parent"]
    if bool(parent) != (begin > 0) or (parent and not KEY.fullmatch(parent)):
        raise CorruptNode(f"parent {parent[:128]!r} of a node at token {begin}")
    if parent == strings["key"]:
        raise CorruptNode(f"node {parent[:128]}: expected another node as its parent")
    return NodeMetadata(
        namespace=strings["namespace"],
        key=strings["key"],
        parent=parent,
        begin=begin,
        end=end,
        split=_split(strings["split"]),
        created_s=_number(strings, "created"),
        generated=_flag(strings, "generated"),
        turn_end=_flag(strings, "turn_end"),
    )


def _split(text: str) -> tuple[int, ...]:
    if len(text) > MAX_SPLIT_CHARACTERS:
        raise CorruptNode(f"split of {len(text)} characters: {MAX_SPLIT_CHARACTERS} are allowed")
    numbers = text.split(",")
    if not all(NUMBER.fullmatch(number) for number in numbers):
        raise CorruptNode(f"split {text[:128]!r}: expected the shards' first layers")
    layers = tuple(map(int, numbers))
    if layers[0] != 0 or any(a >= b for a, b in pairwise(layers)):
        raise CorruptNode(f"split {layers}: expected 0, then strictly rising layers")
    return layers


def _number(strings: Mapping[str, str], field: str) -> int:
    if not NUMBER.fullmatch(strings[field]):
        raise CorruptNode(f"{field} {strings[field][:128]!r}: expected a number")
    return int(strings[field])


def _flag(strings: Mapping[str, str], field: str) -> bool:
    if strings[field] not in FLAGS:
        raise CorruptNode(f"{field} {strings[field][:128]!r}: expected yes or no")
    return FLAGS[strings[field]]
