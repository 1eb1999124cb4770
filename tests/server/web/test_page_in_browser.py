"""The page in a real browser, if one is installed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.acceptance.check_clients import server
from tests.acceptance.check_page import BROWSER, PROGRAMS, drive

VARIABLE = "LUCEASYNC_TEST_BROWSER"
FOLDER = Path(os.environ.get(VARIABLE) or "/nowhere")


@pytest.mark.slow
@pytest.mark.skipif(
    not (FOLDER / BROWSER.folder_name / "installed").exists() or shutil.which("node") is None,
    reason=f"no Chromium: {VARIABLE} names no folder with one from tests/acceptance/check_page.py",
)
def test_every_case_of_the_page_passes(tmp_path):
    with server(tmp_path / "run", "--template", "qwen3.5") as url:
        told = [line for program in PROGRAMS for line in drive(FOLDER, program, url)]
    assert told and [line for line in told if line["error"]] == []
