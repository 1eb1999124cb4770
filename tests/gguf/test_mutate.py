"""No header crashes the reader, hangs it or fills memory."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

MAX_MB = 64


@pytest.mark.slow
def test_mutated_headers_are_specs_or_one_line(tmp_path: Path):
    command = [sys.executable, "-m", "tests.gguf.mutate", "500", "1", str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    told = re.fullmatch(r"(\d+) of 500 refused, .* ([\d.]+) MB\n", done.stdout)
    assert told is not None, done.stdout
    assert 300 < int(told[1]) < 500
    assert float(told[2]) < MAX_MB
