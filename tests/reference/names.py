"""Snapshot tensor names by regular expression: the slow truth of luceasync.cyext.names."""

import re

NAME = re.compile(r"ls(0|[1-9][0-9]*)_([a-z][a-z0-9_]{0,63})\.(0|[1-9][0-9]*)")


def parse_name(name: str) -> tuple[int, str, int] | None:
    """Shard, kind and layer, or None where `name` is no tensor name."""
    match = NAME.fullmatch(name)
    if match is None or int(match[1]) >= 2**16 or int(match[3]) >= 2**16:
        return None
    return int(match[1]), match[2], int(match[3])


def rename_table(names: list[str], begins: list[int]) -> dict[str, str]:
    """Every name under the split that starts its shards at `begins`; names must be valid."""
    table = {}
    for name in names:
        _, kind, layer = parse_name(name)
        shard = max(s for s in range(len(begins)) if begins[s] <= layer)
        table[name] = f"ls{shard}_{kind}.{layer}"
    return table
