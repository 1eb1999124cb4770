"""The page's scripts that decide without a browser, in Node.js if that is installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from luceasync.server.web import page
from luceasync.status import conversation_label

WEB = Path(page.__file__).parent
CASES = Path(__file__).with_name("scripts.mjs")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js")
def test_every_case_of_the_scripts_passes(tmp_path):
    for script in (*WEB.glob("*.js"), CASES):
        shutil.copy(script, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')  # as a browser takes them
    ran = subprocess.run(
        ["node", CASES.name, conversation_label("Ünamed")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
