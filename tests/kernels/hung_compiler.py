"""The serve command on a GPU that does not exist, whose assembler hangs:

python -m tests.kernels.hung_compiler DIRECTORY PATIENCE_S

The file `asked` appears in DIRECTORY as soon as the assembler runs.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from unittest import mock

import torch
from triton.runtime import driver

from luceasync.cli import app
from luceasync.pipeline.capture import compiled_ahead
from tests.kernels.fake_gpu import GPU, FakeDriver, norms

ASSEMBLER = """#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 12.8, V12.8.93" && exit
touch {directory}/asked
exec sleep 3600
"""


def main() -> None:
    directory, patience_s = Path(sys.argv[1]), float(sys.argv[2])
    program = directory / "ptxas"
    program.write_text(ASSEMBLER.format(directory=directory))
    program.chmod(0o755)
    os.environ |= {"TRITON_PTXAS_PATH": str(program), "TRITON_CACHE_DIR": str(directory / "cache")}
    driver.set_active(FakeDriver())

    def load(recipe: object, orders: object) -> None:
        with compiled_ahead(GPU, patience_s):
            norms(64)

    sys.argv = ["luceasync", "serve", "--port", "0"]
    with (
        mock.patch("luceasync.engine.start.load", load),
        mock.patch.object(torch.cuda, "device", lambda device: contextlib.nullcontext()),
    ):
        app.main()


if __name__ == "__main__":
    main()
