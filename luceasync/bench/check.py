"""`luceasync bench check`: every bench in a short form, beside the figures kept for the device.

Owns the short forms, the figures that are taken from their rows, and the file of kept figures. Each
bench runs in its own process, so that none affects the memory or threads of the next one.
"""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from luceasync.bench.device import device_kind, gpu_pair, is_gpu, runs_cuda
from luceasync.bench.report import NOTHING, Report, figure, share
from luceasync.bench.servers import Ended, run_python
from luceasync.errors import ConfigError

ROOT = Path(__file__).parents[2]
KEPT_FILE = ROOT / "docs" / "results" / "figures.json"
BENCH_DEADLINE_S, TESTS_DEADLINE_S = 300.0, 3600.0
CPU_SLACK = 3.0  # tolerances on a CPU, which is shared with other programs, over those on a GPU
TEST_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|xfailed|deselected)\b")
FAILED_TEST = re.compile(r"(FAILED|ERROR) ")

Row = Mapping[str, Any]  # a line of JSON that a bench prints
Verdict = Literal["same", "better", "worse", "new", "missing", "not run"]


# --- short forms ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FigureRule:
    """A column of a bench that is compared.

    `tolerance` 0.1: more than 1.1 times the kept figure is worse. `rows` are names of rows; empty:
    all rows. The name of a row consists of the text and whole numbers before its first measured
    value, joined by commas.
    """

    column: str
    tolerance: float
    is_lower_better: bool = False
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShortBench:
    """A bench command's arguments, and the figures taken from its rows."""

    name: str
    words: tuple[str, ...]
    rules: tuple[FigureRule, ...]


def higher(column: str, tolerance: float, *rows: str) -> FigureRule:
    return FigureRule(column, tolerance, False, rows)


def lower(column: str, tolerance: float, *rows: str) -> FigureRule:
    return FigureRule(column, tolerance, True, rows)


# Ratios within one run, and two figures that other load hardly affects: tau, and processor time.
RULES: Mapping[str, tuple[FigureRule, ...]] = {
    "decode": (higher("limit / step", 0.1),),
    "prefill": (higher("share", 0.1),),
    "speculation": (
        lower("block 16", 0.15),
        lower("block 16, tree 22", 0.15),
        higher("ratio", 0.4, "chain"),
        higher("tau", 0.1, "chain"),
    ),
    "restore": (
        lower("p99 / alone", 0.5, "beside saves", "beside restores"),
        higher("of the copy", 0.2, "save of a node", "restore of a node", "restore of turns"),
        lower("ratio", 0.3, "page cache"),
        higher("prefill / it", 0.3, "page cache"),
    ),
    "paging": (
        higher("whole / lru", 0.1),
        lower("qk / lru", 0.1),
        lower("first / line", 0.3),
    ),
    "serve": (
        lower("loop CPU", 0.5, "16, as fast as sent"),
        lower("this", 0.3, "first token, beside three over beside one"),
        lower("this", 0.2, "the same, processor time"),
    ),
    "kernels": (
        higher("of copy bandwidth", 0.1),
        higher("limit / CUDA C++", 0.1),
        higher("of a plain copy", 0.3, "fill", "fill_with_checksums", "checksums alone"),
    ),
    "ipc": (
        lower("hop / bare, p50", 0.3, "back to back"),
        higher("of the slower half", 0.3, "chunks"),
    ),
    "processes": (higher("one / two", 0.15),),
}
BENCHES = tuple(RULES)


def short_benches(device: str, only: Sequence[str]) -> list[ShortBench]:
    """The benches for that device, in a form that takes seconds each."""
    slack, words = (1.0, gpu_words(device)) if is_gpu(device) else (CPU_SLACK, cpu_words(device))
    return [
        ShortBench(
            name,
            tuple(words[name].split()),
            tuple(replace(rule, tolerance=slack * rule.tolerance) for rule in RULES[name]),
        )
        for name in BENCHES
        if name in only and name in words
    ]


def gpu_words(device: str) -> dict[str, str]:
    """The command of each bench on a GPU. `serve` omits the question there, since a GPU reads
    prompts of the bundled model too fast for anything to wait; `processes` needs two GPUs.
    """
    words = {
        "decode": f"decode --models qwen3-4b,qwen3.5-4b,qwen3-4b:Q4_K_M --devices {device} "
        "--rounds 3",
        "prefill": f"prefill --models qwen3-4b,qwen3.5-4b --devices {device} --prompts 8192",
        "speculation": f"speculation --only rounds,servers --shape qwen3-4b --device {device} "
        "--lanes 1 --rounds 10 --questions 30",
        "restore": f"restore --shape qwen3-0.6b --device {device} --tokens 8192 --steps 60 "
        "--rounds 2",
        "paging": f"paging --shape qwen3-0.6b --device {device} --context 32768 --pool 4096 "
        "--steps 64 --turns 2 --memory 8",
        "serve": "serve --only overhead --streams 16",
        "kernels": "kernels --contexts 32768 --rounds 5",
        "ipc": "ipc --only hops --rounds 3 --hops 800 --chunks 10",
    }
    if not runs_cuda(device):
        words["kernels"] = "kernels --only copies"
    if pair := gpu_pair(device):
        words["processes"] = (
            f"ipc --only processes --rounds 3 --devices {','.join(pair)} --shape qwen3-0.6b"
        )
    return words


def cpu_words(device: str) -> dict[str, str]:
    """The command of each bench on a CPU."""
    return {
        "decode": f"decode --models small,small-hybrid:Q8_0 --devices {device} --contexts 512 "
        "--rounds 3",
        "prefill": f"prefill --models small,small-hybrid --devices {device} --prompts 512",
        "speculation": f"speculation --only rounds,servers --device {device} "
        "--contexts 256 --lanes 1 --dtype fp32 --rounds 5 --questions 6 --max-tokens 48",
        "restore": f"restore --device {device} --dtype fp32 --tokens 2048 --steps 20 --rounds 1",
        "paging": f"paging --device {device} --dtype fp32 --context 4096 --pool 512 --lanes 1 "
        "--steps 64 --rounds 2 --turns 2",
        "serve": f"serve --only overhead,question --device {device} --streams 16 --tokens 100 "
        "--sentences 60 --rounds 1",
        "kernels": "kernels --only copies --tokens 512 --rounds 5",
        "ipc": "ipc --only hops --hops 400 --chunks 5 --rounds 3",
        "processes": "ipc --only processes --rounds 3",
    }


# --- figures and their comparison -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TakenFigure:
    """A figure of this run."""

    name: str
    value: float
    rule: FigureRule


class KeptFigure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure of an earlier run, and by how much a later one may be worse."""

    value: Annotated[float, msgspec.Meta(gt=0)]
    tolerance: Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Compared:
    """A line of the table."""

    name: str
    kept: KeptFigure | None
    now: float | None
    verdict: Verdict


def figures_in(bench: ShortBench, rows: Sequence[Row]) -> list[TakenFigure]:
    """The figures that the rules select; empty cells are skipped."""
    found = []
    for row in rows:
        name = row_name(row)
        for rule in bench.rules:
            value = row.get(rule.column)
            if value in (None, "") or (rule.rows and name not in rule.rows):
                continue
            title = f"{bench.name}, {name}: {rule.column}"
            found.append(TakenFigure(title, float(value), rule))
    return found


def row_name(row: Row) -> str:
    """The cells before the first measured value."""
    cells = []
    for key, cell in row.items():
        if cell is None or isinstance(cell, float):
            break
        if key != "table":
            cells.append(str(cell))
    return ", ".join(cells)


def verdict_of(kept: KeptFigure, now: float, *, is_lower_better: bool) -> Verdict:
    """Compare a figure with the kept one, within its tolerance. Figures are positive numbers; any
    other value is worse.
    """
    if not 0 < now < inf:
        return "worse"
    loss = now / kept.value if is_lower_better else kept.value / now
    if loss > 1 + kept.tolerance:
        return "worse"
    return "better" if loss * (1 + kept.tolerance) < 1 else "same"


def compare(
    kept: Mapping[str, KeptFigure], taken: Sequence[TakenFigure], measured: Collection[str]
) -> list[Compared]:
    """A line for each figure of this run, then for each kept one that it lacks: "missing" if its
    bench is among the `measured`, otherwise "not run".
    """
    lines = []
    for each in taken:
        known = kept.get(each.name)
        verdict: Verdict = "new"
        if known is not None:
            verdict = verdict_of(known, each.value, is_lower_better=each.rule.is_lower_better)
        lines.append(Compared(each.name, known, each.value, verdict))
    found = {each.name for each in taken}
    for name in sorted(kept.keys() - found):
        verdict = "missing" if name.partition(",")[0] in measured else "not run"
        lines.append(Compared(name, kept[name], None, verdict))
    return lines


def best_of(first: Sequence[TakenFigure], second: Sequence[TakenFigure]) -> list[TakenFigure]:
    """The better value of two runs, for each figure."""
    values = {each.name: each.value for each in second}
    found = []
    for each in first:
        choose = min if each.rule.is_lower_better else max
        found.append(replace(each, value=choose(each.value, values.get(each.name, each.value))))
    return found


def kept_after(
    kept: Mapping[str, KeptFigure], taken: Sequence[TakenFigure], measured: Collection[str]
) -> dict[str, KeptFigure]:
    """The figures to keep after a run: the new values of the `measured` benches, and the kept
    values of others. Tolerances in the file are preserved.
    """
    after = {name: each for name, each in kept.items() if name.partition(",")[0] not in measured}
    for each in taken:
        if 0 < each.value < inf:
            known = kept.get(each.name)
            tolerance = each.rule.tolerance if known is None else known.tolerance
            after[each.name] = KeptFigure(float(f"{each.value:.4g}"), round(tolerance, 4))
    return after


# --- the file -------------------------------------------------------------------------------------

KeptFile = dict[str, dict[str, KeptFigure]]  # by device, as torch names it, and by figure


def read_kept(path: Path) -> KeptFile:
    """The kept figures of all devices; empty if there is no file. Raises ConfigError."""
    try:
        devices = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, msgspec.Raw]])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"--figures {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--figures {path}: {error}; expected devices with figures") from None
    kept: KeptFile = {}
    for device, figures in devices.items():
        kept[device] = {
            name: parse_kept(f"{path}: {device}: {name}", figures[name]) for name in figures
        }
    return kept


def parse_kept(place: str, raw: msgspec.Raw) -> KeptFigure:
    """Parse a kept figure. Raises ConfigError."""
    try:
        return msgspec.json.decode(raw, type=KeptFigure)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--figures {place}: {error}") from None


def write_kept(path: Path, kept: KeptFile) -> None:
    """Replace the file. Raises ConfigError."""
    text = json.dumps(msgspec.to_builtins(kept), indent=1, sort_keys=True)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--figures {path}: {error.strerror}") from None


# --- a run ----------------------------------------------------------------------------------------


RunPython = Callable[[Sequence[str], Path, float], Ended]


class CheckRun:
    """One run on a device: the figures measured so far, and whether all benches succeeded."""

    def __init__(self, report: Report, kept: Mapping[str, KeptFigure], run: RunPython) -> None:
        self._report = report
        self._run = run
        self._kept = kept
        self.taken: list[TakenFigure] = []
        self.measured: set[str] = set()
        self.has_failed = False

    def test(self) -> None:
        """Run the tests that need a GPU. If none passes, that is a failure too."""
        if not (ROOT / "tests").is_dir() or importlib.util.find_spec("pytest") is None:
            self._tell("tests", "skipped: they need a checkout and pytest", 0.0)
            return
        words = ["pytest", "-m", "gpu", "-q", "-rfE", "--no-header", "--tb=short", "tests"]
        ended = self._run(words, ROOT, TESTS_DEADLINE_S)
        counts = count_tests(ended.output)
        said, errors = ", ".join(f"{n} {what}" for what, n in counts.items()) or "none ran", ""
        if ended.status != 0 or not counts.get("passed"):
            self.has_failed = True
            lines = [line for line in ended.output.splitlines() if FAILED_TEST.match(line)]
            errors = "\n".join(lines) or ended.last_errors or f"exit {ended.status}"
        self._tell("tests", said, ended.seconds, errors)

    def measure(self, bench: ShortBench) -> None:
        """Run the bench; repeat it if a figure is worse, since other load may have interfered. The
        better value counts.
        """
        found = self._figures(bench)
        if found is None:
            return
        lines = compare(self._kept, found, ())
        if any(line.verdict == "worse" for line in lines):
            found = best_of(found, self._figures(bench) or ())
        self.taken += found
        self.measured.add(bench.name)

    def _figures(self, bench: ShortBench) -> list[TakenFigure] | None:
        ended = self._run(["luceasync", "bench", *bench.words, "--json"], ROOT, BENCH_DEADLINE_S)
        if ended.status == 0:
            rows = [json.loads(line) for line in ended.output.splitlines() if line[:1] == "{"]
            found = figures_in(bench, [row for row in rows if "table" in row])
            self._tell(bench.name, f"{len(found)} figures", ended.seconds)
            return found
        if ended.lacks is not None:
            self._tell(bench.name, f"skipped: needs {ended.lacks}", ended.seconds)
            return None
        self.has_failed = True
        why = "was killed at its deadline" if ended.status is None else f"exit {ended.status}"
        command = f"luceasync bench {' '.join(bench.words)}"
        self._tell(bench.name, f"FAILED: {why}: {command}", ended.seconds, ended.last_errors)
        return None

    def _tell(self, what: str, outcome: str, seconds: float, errors: str = "") -> None:
        self._report.say(f"{what}: {outcome} ({seconds:.0f} s)" + (f"\n{errors}" if errors else ""))
        fields = {"ran": what, "outcome": outcome, "seconds": round(seconds, 1)}
        self._report.keep(fields | ({"errors": errors} if errors else {}))


def count_tests(output: str) -> dict[str, int]:
    """Numbers of tests by outcome, from pytest's last line."""
    last = output.strip().rpartition("\n")[2]
    return {what: int(count) for count, what in TEST_COUNT.findall(last)}


def bench_check(
    report: Report,
    device: str,
    *,
    only: Sequence[str],
    has_tests: bool,
    path: Path,
    keeps: bool,
    run: RunPython = run_python,
) -> bool:
    """Tests, then benches in their short form, then a table of all figures beside those in `path`
    for devices of this kind. `keeps`: write this run's figures into that file. `run` replaces
    `run_python`.

    Returns whether no test or bench has failed and no figure is worse or missing. Raises
    ConfigError if the file is not a file of figures.
    """
    started = time.perf_counter()
    kind, kept = device_kind(device), read_kept(path)
    known = kept.get(kind, {})
    if not known:
        report.say(f"{path.name} has no figures of {kind}: nothing to compare with")
    check = CheckRun(report, known, run)
    if has_tests:
        check.test()
    for bench in short_benches(device, only):
        check.measure(bench)
        if keeps:  # after each of them, since a later one may be killed
            write_kept(path, kept | {kind: kept_after(known, check.taken, check.measured)})
    lines = compare(known, check.taken, check.measured)
    show(report, kind, lines)
    if keeps:
        report.say(f"\nkept in {path}")
    bad = [line for line in lines if line.verdict in ("worse", "missing")]
    failed = ", and a test or bench has failed" if check.has_failed else ""
    seconds = time.perf_counter() - started
    report.say(f"\n{len(lines)} figures in {seconds:.0f} s, {len(bad)} worse or missing{failed}")
    return not bad and not check.has_failed


def show(report: Report, kind: str, lines: Sequence[Compared]) -> None:
    """A row for each figure."""
    table = report.table(("figure", "kept", "now", "tolerance", "verdict"), kind)
    for line in lines:
        kept, tolerance = NOTHING, NOTHING
        if line.kept is not None:
            kept, tolerance = figure(line.kept.value, digits=3), share(line.kept.tolerance)
        now = NOTHING if line.now is None else figure(line.now, digits=3)
        table.add(line.name, kept, now, tolerance, line.verdict)
