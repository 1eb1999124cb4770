"""Backends in processes of this environment, which play other vendors if they are told to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from luceasync.config import PlacementConfig

ROOT = Path(__file__).parents[1]

# Devices in layer order, and which of them are elsewhere: one, two and three processes, and two
# stages of this process around another one's.
ARRANGEMENTS = {
    "one": ("cpu:0,cpu:1,cpu:2", ""),
    "two": ("cpu:0,hip:0,hip:1", "hip:0=cpu:0 hip:1=cpu:1"),
    "three": ("cpu:0,hip:0,cuda:0", "hip:0=cpu:0 cuda:0=cpu:0"),
    "between": ("cpu:0,hip:0,cpu:1", "hip:0=cpu:0"),
    "before": ("hip:0,cpu:0,cpu:1", "hip:0=cpu:0"),
    "away": ("hip:0,cuda:0,hip:1", "hip:0=cpu:0 cuda:0=cpu:0 hip:1=cpu:1"),
}


BACKEND = "luceasync.backend"


def backend_program(folder: Path, offers: Sequence[str] = (), module: str = BACKEND) -> Path:
    """A luceasync-backend that offers its devices under other names too."""
    path = folder / "luceasync-backend"
    renamed = "".join(f" --offer {offer}" for offer in offers)
    path.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={ROOT}\nexec {sys.executable} -m {module}{renamed} "$@"\n'
    )
    path.chmod(0o755)
    return path


def placed(
    folder: Path, arrangement: str, transport: str = "auto", module: str = BACKEND
) -> PlacementConfig:
    """Where the layers go; `module` is what runs those that are elsewhere."""
    devices, offers = ARRANGEMENTS[arrangement]
    bins = (str(backend_program(folder, offers.split(), module)),) if offers else ()
    return PlacementConfig(tuple(devices.split(",")), ipc_bins=bins, ipc_transport=transport)
