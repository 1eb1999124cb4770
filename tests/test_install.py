"""scripts/install in a checkout whose interpreter only notes what pip is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEADLINE_S = 600.0

# Notes the arguments of pip; runs everything else.
PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then shift 2; echo "$*" >>pip.log; exit 0; fi
exec {sys.executable} "$@"
"""


class Checkout:
    """A copy of what the script reads, with a virtual environment that is complete."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("pyproject.toml", "setup.py", "constraints.txt", "scripts/install"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        shutil.copytree(ROOT / "cyext", root / "cyext", ignore=shutil.ignore_patterns("*.so"))
        python = root / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        (root / ".venv" / "pyvenv.cfg").write_text(f"command = python -m venv {root}/.venv\n")

    def install(self, *extras: str, **environ: str) -> tuple[list[str], str]:
        """The commands of pip, and what the script prints on stderr."""
        log = self.root / "pip.log"
        log.write_text("")
        command = [self.root / "scripts" / "install", *extras]
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, **environ},
        )
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines(), done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return Checkout(tmp_path)


@pytest.mark.slow
def test_only_a_changed_source_is_compiled_again(checkout):
    packages, project = checkout.install()[0]
    assert "--requirement .venv/requirements.txt" in packages
    assert project.endswith("--no-deps --editable .")
    assert checkout.install()[0] == []
    with (checkout.root / "cyext" / "rows.pyx").open("a") as source:
        source.write("# changed\n")
    assert len(checkout.install()[0]) == 2
    [packages] = checkout.install("test")[0]  # other extras compile nothing
    assert "--requirement" in packages
    needed = (checkout.root / ".venv" / "requirements.txt").read_text()
    assert "\npytest" in needed and "\ntorch" in needed


def test_an_index_of_torch_is_passed_on(checkout):
    packages, _ = checkout.install(LUCEASYNC_TORCH_INDEX="https://index.example/cpu")[0]
    assert "--extra-index-url https://index.example/cpu" in packages


def test_an_extra_that_does_not_exist_is_refused(checkout):
    command = [checkout.root / "scripts" / "install", "nothing"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 1
    assert "there is no extra nothing; allowed: cuda, store, cluster, ray, test" in done.stderr
