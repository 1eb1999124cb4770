"""The doctor command: what this machine has, what would be used, what is wrong.

Owns the list of checks. A check changes nothing.
"""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import cache_from_source, find_spec
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from luceasync import __version__
from luceasync.cli.output import UNBROKEN_COLUMNS, count_text, size_text
from luceasync.cli.serve import is_open_to_others
from luceasync.config import Config
from luceasync.disk_cache.directory import check_usable, owner_of
from luceasync.errors import LuceasyncError, ModelError
from luceasync.server.http.listener import listen

State = Literal["ok", "note", "broken"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "broken": "red"}
MIN_PYTHON = (3, 11)
CONFIGURED = "quantization_config"
LOW_BYTES = 2**30  # less free space than this is reported


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. "broken" prevents the server from running, "note" does not."""

    subject: str
    state: State
    words: str


Check = Callable[[Config], Iterator[Finding]]


def run_doctor(config: Config) -> bool:
    """Print all findings. Returns whether nothing is broken."""
    findings = list(examine(config))
    table = Table(title=f"luceasync {__version__}", title_justify="left", show_header=False)
    for finding in findings:
        state = f"[{STYLES[finding.state]}]{finding.state}[/]"
        table.add_row(finding.subject, state, Text(finding.words))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = UNBROKEN_COLUMNS  # one line per finding
    console.print(table)
    return all(finding.state != "broken" for finding in findings)


def examine(config: Config) -> Iterator[Finding]:
    """Run every check. An exception in a check becomes a finding, and does not stop the others."""
    checks: tuple[tuple[str, Check], ...] = (
        ("python", _python),
        ("torch", _torch),
        ("kernels", _kernels),
        ("memory", _memory),
        ("disk", _disk),
        ("cache", _cache),
        ("model", _model),
        ("model files", _model_files),
        ("store", _store),
        ("chat template", _template),
        ("port", _port),
    )
    for subject, check in checks:
        try:
            yield from check(config)
        except LuceasyncError as error:
            yield Finding(subject, "broken", str(error))
        except Exception as error:
            yield Finding(subject, "broken", f"{type(error).__name__}: {error}")


def _python(config: Config) -> Iterator[Finding]:
    fine = sys.version_info >= MIN_PYTHON
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", "ok" if fine else "broken", words)
    if not _is_compiled("torch"):
        yield Finding(
            "bytecode",
            "note",
            "of torch is not kept: Python compiles its source at each start, which takes seconds; "
            "unset PYTHONDONTWRITEBYTECODE, or set PYTHONPYCACHEPREFIX to a directory that this "
            "user may write to",
        )


def _is_compiled(package: str) -> bool:
    """Whether Python keeps the package's bytecode; True if there is no source to compile."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return True
    return Path(cache_from_source(spec.origin)).is_file()


def _torch(config: Config) -> Iterator[Finding]:
    import torch

    from luceasync.pipeline.devices import find_devices
    from luceasync.pipeline.gpu_platform import found_gpus, torch_build
    from luceasync.pipeline.offer import default_dtype

    yield Finding("torch", "ok", f"{torch.__version__} (build: {torch_build()})")
    for gpu in found_gpus():
        words = f"{gpu.product}, {size_text(gpu.free_bytes)} free of {size_text(gpu.total_bytes)}"
        if gpu.caution:
            words = f"{words}; {gpu.caution}"
        yield Finding(gpu.name, "note" if gpu.caution else "ok", words)
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count()
    bf16 = default_dtype(find_devices(("cpu",))) == "bf16"
    words = f"{cores} cores, {'native bf16' if bf16 else 'no native bf16: fp32 is used'}"
    yield Finding("cpu", "ok", words)


def _kernels(config: Config) -> Iterator[Finding]:
    """Kernel compilers, needed only on GPUs: on a CPU, torch alone suffices."""
    for name, missing in (
        ("triton", "no GPU kernels"),
        ("numba-cuda", "drafting is slower on NVIDIA GPUs; install the extra 'cuda'"),
    ):
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "note", f"not installed: {missing}")


def _memory(config: Config) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    words = f"{size_text(memory.available)} free of {size_text(memory.total)}"
    yield Finding("memory", "note" if memory.available < LOW_BYTES else "ok", words)


def _disk(config: Config) -> Iterator[Finding]:
    yield _space("disk", Path.home() if Path.home().is_dir() else Path.cwd())


def _cache(config: Config) -> Iterator[Finding]:
    """Whether prefixes would survive a restart. Creates and writes nothing."""
    root = config.cache.cache_dir
    if root is None:
        words = "prefixes stay in memory; --kv-cache-dir keeps them across restarts"
        yield Finding("cache", "ok", words)
        return
    yield _space("cache", check_usable(root))
    if owner := owner_of(root):
        yield Finding("cache owner", "note", f"{root}{owner}")
    mode = root.stat().st_mode & 0o777 if root.exists() else 0
    if mode & 0o077:
        words = f"mode {mode:o}: accessible to other users of this machine; chmod 700 {root}"
        yield Finding("cache mode", "note", words)


def _space(subject: str, directory: Path) -> Finding:
    usage = shutil.disk_usage(directory)
    words = f"{size_text(usage.free)} free of {size_text(usage.total)} in {directory}"
    return Finding(subject, "note" if usage.free < LOW_BYTES else "ok", words)


def _model(config: Config) -> Iterator[Finding]:
    """The model and devices that would be used, or why they cannot be."""
    from luceasync.models.files import ModelFiles
    from luceasync.speculation.dflash.placement import copied_shapes, plan_with_drafter
    from luceasync.speculation.mtp import mtp_of

    model = ModelFiles(config.model.model_dir)
    report, drafter = plan_with_drafter(config, model)
    spec, plan = report.spec, report.plan
    words = f"{spec.family}, {spec.num_parameters / 1e6:,.1f} M parameters"
    yield Finding("model", "ok", f"{config.model.model_dir}: {words}")
    if (scheme := model.scheme) is not None:
        activations = f"activations in {plan.precision.compute}"
        yield Finding(
            "quantisation", "ok", f"{scheme.name}; {activations}, whatever {CONFIGURED} says"
        )
    where = ", ".join(shard.device for shard in plan.shards)
    lanes = f"{count_text(plan.parallel, 'lane')} of {plan.max_ctx_tokens} tokens"
    yield Finding("plan", "ok", f"{plan.precision.compute} on {where}, {lanes}")
    copies = "proposals are copied from the text"
    has_copies = bool(copied_shapes(config, drafter, plan.devices))
    words = f"none: {copies if has_copies else 'one token per step'}"
    if drafter is not None:
        words = (
            f"{drafter.draft_dir}: on {drafter.device.name}, {drafter.spec.block} rows per proposal"
            + (f"; {copies}, too" if has_copies else "")
        )
    if (mtp := mtp_of(config, model, plan.devices, plan.precision)) is not None:
        words = f"the model's own head (mtp), {mtp.shapes[0].block} rows per proposal" + (
            f"; {copies}, too" if has_copies else ""
        )
    yield Finding("drafter", "ok", words)


def _model_files(config: Config) -> Iterator[Finding]:
    """The files that serving needs besides config.json. A GGUF file contains all of them."""
    from luceasync.gguf.vocabulary import vocabulary_of
    from luceasync.models.files import ModelFiles

    model = ModelFiles(config.model.model_dir)
    if (gguf := model.gguf) is not None:
        yield Finding("weights", "ok", _sizes(gguf.paths))
        num_ends = len(vocabulary_of(gguf).eos_ids)
        yield Finding("tokenizer", "ok", f"in {gguf.path.name}, {num_ends} end tokens")
        return
    for pattern, purpose in (("*.safetensors", "weights"), ("tokenizer.json", "tokenizer")):
        files = list(config.model.model_dir.glob(pattern))
        if files and purpose == "weights":
            try:  # headers only; missing tensors are a finding about the model
                model.weights.check({})
            except ModelError as error:
                yield Finding(purpose, "broken", str(error))
                continue
        if files:
            yield Finding(purpose, "ok", _sizes(files))
        else:
            yield Finding(purpose, "broken", f"no {pattern} in {config.model.model_dir}")


def _sizes(files: Sequence[Path]) -> str:
    num_bytes = sum(file.stat().st_size for file in files)
    return f"{count_text(len(files), 'file')}, {size_text(num_bytes)}"


def _store(config: Config) -> Iterator[Finding]:
    """The namespaces in the store, and how those of other servers differ from ours."""
    from luceasync.disk_cache.object_store import StoreUpkeep
    from luceasync.models.files import ModelFiles
    from luceasync.pipeline.report import devices_of
    from luceasync.prefix_cache.namespace import facts_of, named

    if (url := config.cache.store_url) is None:
        return
    upkeep = StoreUpkeep(url)
    names = upkeep.namespaces()
    yield Finding("store", "ok", f"{url}: {count_text(len(names), 'namespace')}")
    model, precision = ModelFiles(config.model.model_dir), devices_of(config)[1]
    ours = facts_of(model.weights.paths, model.spec, precision, config.cache.cache_dir)
    there = "there" if named(ours) in names else "not there yet"
    yield Finding("store", "ok", f"{named(ours)}: this server's, {there}")
    for name in names:
        if name != named(ours):
            yield Finding("store", "note", f"{name}: {_difference(ours, upkeep.facts(name))}")


def _difference(ours: Mapping[str, object], theirs: Mapping[str, object] | None) -> str:
    """The differences between two servers that share no nodes."""
    if theirs is None:
        return "no server has said what it depends on"
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    short = {"weights": "other weights", "architecture": "another architecture"}
    words = [
        short.get(name) or f"{name} {theirs.get(name, 'unset')}, {ours.get(name, 'unset')} here"
        for name in names
    ]
    return "; ".join(words) or "the same, named otherwise"


def _template(config: Config) -> Iterator[Finding]:
    """Whether there is a template, and whether it compiles."""
    from luceasync.text.isolation import IsolatedTemplate
    from luceasync.text.template import TemplateSource

    source = TemplateSource.find(config.model.model_dir)
    if source is None:
        yield Finding("chat template", "note", "none: /v1/completions only, no chats")
        return
    IsolatedTemplate(source).check()
    yield Finding("chat template", "ok", f"{len(source.default)} characters")


def _port(config: Config) -> Iterator[Finding]:
    listen(config.server).close()
    words = f"{config.server.host}:{config.server.port} is free"
    if is_open_to_others(config.server):
        words = f"{words}; other machines may use the server: no API key is set"
        yield Finding("port", "note", words)
    else:
        yield Finding("port", "ok", words)
