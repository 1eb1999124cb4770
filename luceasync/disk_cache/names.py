"""The names of files in a directory of nodes: which node, and which half of it.

Pure; knows no content.
"""

from __future__ import annotations

import re

from luceasync.disk_cache.codec import Half
from luceasync.disk_cache.metadata import KEY

SUFFIXES = {Half.ROWS: ".safetensors", Half.END: ".end"}
TEMPORARY = re.compile(r"\.[0-9a-f]+\.([0-9]{1,9})\.[0-9a-f]+\.tmp")
NAMESPACE = re.compile(r"[0-9A-Za-z_-]{1,128}")


def file_name(key: str, half: Half) -> str:
    """The name of the file of this half of the node."""
    return f"{key}{SUFFIXES[half]}"


def parse_file_name(name: str) -> tuple[str, Half] | None:
    """Key and half of a node's file; None for a name that is not ours."""
    for half, suffix in SUFFIXES.items():
        key = name.removesuffix(suffix)
        if key != name and KEY.fullmatch(key):
            return key, half
    return None
