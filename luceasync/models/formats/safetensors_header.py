"""What a safetensors file says that it holds, without opening it as one: that would load torch."""

from __future__ import annotations

import json
from os import SEEK_END
from pathlib import Path
from struct import unpack

from luceasync.errors import ModelError
from luceasync.models.quantisation.found import Info

MAX_HEADER_BYTES = 100_000_000  # as the library has it
# What a header of anything can do: also lists within lists, and numbers that are none.
_FAULTS = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)


def read_infos(path: Path) -> dict[str, Info]:
    """Dtypes and shapes of all tensors of the file. Raises ModelError, for a cut file too."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            begin = file.read(8)
            [num_bytes] = unpack("<Q", begin) if len(begin) == 8 else [MAX_HEADER_BYTES + 1]
            if num_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"its header would have {num_bytes} bytes")
            header = json.loads(file.read(num_bytes))
            there = file.seek(0, SEEK_END)
        header.pop("__metadata__", None)
        ends = (int(entry["data_offsets"][1]) for entry in header.values())
        expected = 8 + num_bytes + max(ends, default=0)
        if there < expected:
            raise ValueError(f"it is cut: {there} bytes are there, {expected} are expected")
        return {
            name: Info(str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in header.items()
        }
    except _FAULTS as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
