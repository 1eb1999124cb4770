"""The commands from outside: imports, output and exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from luceasync import __version__
from luceasync.cli.flags import FOREIGN_FLAGS, POSITIONAL
from luceasync.options import OPTIONS, SECTIONS
from tests.cli.forked import Commands, commands

SERVING = ("serve", "doctor")  # the commands with the flags of a server


@pytest.fixture(scope="module")
def luceasync() -> Iterator[Commands]:
    with commands("plan", "/none") as ready:
        yield ready


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[], ["serve"], ["chat"], ["plan"], ["doctor"], ["cache", "ls"], ["warm"]]
)
def test_help_imports_no_torch(luceasync, words):
    result = luceasync.run(*words, "--help")
    assert (result.returncode, result.loaded) == (0, []), result.stderr
    assert "Usage:" in result.stdout


@pytest.mark.slow
def test_version():
    for flag in ("--version", "-V"):
        command = [sys.executable, "-m", "luceasync", flag]
        printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert printed.stdout == f"luceasync {__version__}\n"


@pytest.mark.slow
def test_every_setting_of_the_server_is_a_flag_of_serve(luceasync):
    text = luceasync.run("serve", "--help", COLUMNS="100").stdout
    for flag in ("--host", "--port", "--parallel", "--max-ctx", "--dtype", "--api-key", "--config"):
        assert flag in text
    assert "(default: 8000)" in text


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "chat", "plan", "doctor"])
def test_help_fits_80_columns_and_cuts_no_flag(luceasync, command):
    text = luceasync.run(command, "--help", COLUMNS="80").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    shown = [option for option in OPTIONS if option.section != "server" or command in SERVING]
    missing = [o.flag for o in shown if o.name != POSITIONAL and f"│ {o.flag} " not in text]
    assert missing == []


def test_help_has_a_panel_for_each_section_in_order(luceasync):
    titles = re.findall("╭─ (.+?) ─", luceasync.run("serve", "--help", COLUMNS="80").stdout)
    assert titles == ["Arguments", "Options", *SECTIONS.values()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["serve", "--port", "x"], {}, "--port: 'x' is not allowed"),
        (["serve"], {"LUCEASYNC_PARALLEL": "0"}, "LUCEASYNC_PARALLEL: '0' is not allowed"),
        (["serve"], {"LUCEASYNC_CONFIG": "/none.toml"}, "--config: cannot read /none.toml"),
        (["plan", "/none"], {}, "/none"),
        (["plan", "--target-devices", "abacus"], {}, "--target-devices"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_2(luceasync, arguments, environ, words):
    result = luceasync.run(*arguments, **environ)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("luceasync: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--port", "1"], "no such flag: --port"),
        (["serve", "--prot", "1"], "no such flag: --prot; did you mean --port?"),
        (["serve", "-m", "model.gguf"], "no such flag: -m; the model is the first argument"),
        (["serve", "--ctx-size=8192"], "no such flag: --ctx-size; --max-ctx is the context"),
        (["serve", "-ngl", "99"], "no such flag: -ngl; --target-devices names the devices"),
        (["serve", "one", "two"], "unexpected extra argument"),
        (["warm"], "Missing option '--file'; luceasync warm -h"),
        (["server"], "No such command 'server'"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(luceasync, arguments, words):
    result = luceasync.run(*arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("luceasync: ")
    assert words in result.stderr


def test_flags_of_other_programs_point_to_flags_of_ours():
    flags = {option.flag for option in OPTIONS}
    for hint in FOREIGN_FLAGS.values():
        assert set(re.findall("--[a-z-]+", hint)) <= flags
    assert not FOREIGN_FLAGS.keys() & flags


@pytest.mark.slow
@pytest.mark.parametrize("words", [["serve"], ["plan"], ["warm"]])
def test_help_says_how_a_flag_becomes_a_variable(luceasync, words):
    text = luceasync.run(*words, "--help", COLUMNS="200").stdout
    assert "--max-ctx is LUCEASYNC_MAX_CTX" in text
