"""The bench commands: measurements of this machine, beside its limits or another checkout.

Owns their flags; imports the measurements when a command runs. Default sizes suit a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import ConfigError

if TYPE_CHECKING:
    from luceasync.bench.model import BenchModel
    from luceasync.bench.report import Report
    from luceasync.bench.shapes import Shape

bench_app = typer.Typer(
    name="bench", help="Measure decode, prefill, restores, serving and more.", no_args_is_help=True
)

Dtype = Literal["bf16", "fp32"]

Json = Annotated[bool, typer.Option("--json", help="Print JSON lines instead of tables.")]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="Such as cuda:0 or cpu:0.")]
Devices = Annotated[
    str, typer.Option(metavar="LIST", help="Devices that share the layers, such as cuda:0,cuda:1.")
]
Models = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Paths of models, or shapes with random weights: qwen3-0.6b, qwen3-4b, qwen3.5-4b, "
        "qwen3.5-27b, qwen3.5-35b-a3b, gemma3-4b, small, small-hybrid; SHAPE:Q4_K_M is quantised.",
    ),
]
ShapeName = Annotated[
    str,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="Random weights of this shape: qwen3-0.6b, qwen3-4b, qwen3.5-4b, qwen3.5-27b, small, "
        "small-hybrid.",
    ),
]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Of activations and plain weights.")]
ServerDtype = Annotated[str, typer.Option("--dtype", help="As luceasync serve takes it.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Samples of each variant.")]
Lanes = Annotated[str, typer.Option(metavar="LIST", help="Numbers of lanes, such as 1,4.")]
Contexts = Annotated[str, typer.Option(metavar="LIST", help="Tokens before, such as 1024,32768.")]
Context = Annotated[int, typer.Option(min=64, metavar="TOKENS", help="Tokens of a lane.")]
Tokens = Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the prompt.")]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Decode steps of a sample.")]
Profile = Annotated[bool, typer.Option("--profile", help="List the kernels and their times.")]


@bench_app.command()
def decode(
    models: Models = "small",
    devices: Devices = "cpu:0",
    contexts: Contexts = "1024",
    lanes: Lanes = "1,4",
    dtype: DtypeOption = "bf16",
    steps: Steps = 32,
    rounds: Rounds = 5,
    peer: Annotated[
        bool, typer.Option("--peer", help="Also transformers' generate, in the same process.")
    ] = False,
    profile: Profile = False,
    as_json: Json = False,
) -> None:
    """Decode steps, beside the limit of the memory bandwidth."""
    from luceasync.bench.passes import bench_decode

    names = devices.split(",")
    bench_decode(
        _open_report(names, as_json),
        _models(models),
        names,
        contexts=_numbers("--contexts", contexts),
        lanes=_numbers("--lanes", lanes),
        dtype=dtype,
        steps=steps,
        rounds=rounds,
        peer=peer,
        profile=profile,
    )


@bench_app.command()
def prefill(
    models: Models = "small",
    devices: Devices = "cpu:0",
    prompts: Annotated[
        str, typer.Option(metavar="LIST", help="Tokens of a prompt, such as 1024,8192.")
    ] = "1024",
    dtype: DtypeOption = "bf16",
    rounds: Rounds = 3,
    profile: Profile = False,
    as_json: Json = False,
) -> None:
    """Prompts, beside the rate of a large matrix product."""
    from luceasync.bench.passes import bench_prefill

    names = devices.split(",")
    bench_prefill(
        _open_report(names, as_json),
        _models(models),
        names,
        prompts=_numbers("--prompts", prompts),
        dtype=dtype,
        rounds=rounds,
        profile=profile,
    )


@bench_app.command()
def speculation(
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Of verify,rounds,servers,edits.")
    ] = "verify,rounds",
    shape: ShapeName = "small",
    model: Annotated[
        Path, typer.Option(metavar="PATH", help="A model that edits code, for edits.")
    ] = BUNDLED_MODEL_DIR,
    draft: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A drafter for that model.")
    ] = None,
    device: Device = "cpu:0",
    contexts: Contexts = "1024",
    lanes: Lanes = "1,4",
    dtype: DtypeOption = "bf16",
    rounds: Rounds = 20,
    questions: Annotated[int, typer.Option(min=1, metavar="N", help="For servers, edits.")] = 40,
    clients: Annotated[int, typer.Option(min=1, metavar="N", help="For servers.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=2, help="Of an answer, for servers, edits.")] = 128,
    kinds: Annotated[
        str, typer.Option(metavar="LIST", help="Of answers, for edits.")
    ] = "rewrite,replace,diff,code,prose",
    ddtree: Annotated[bool, typer.Option("--ddtree", help="A server with trees, too.")] = False,
    as_json: Json = False,
) -> None:
    """Verify passes and whole rounds beside decode steps; servers with and without the drafter;
    edits of code with and without copied proposals, and with a drafter.
    """
    parts = _parts(only, ("verify", "rounds", "servers", "edits"))
    from luceasync.bench.model import parse_model
    from luceasync.bench.speculation import bench_rounds, bench_servers, bench_verify

    found = _shape(shape)
    report = _open_report([device], as_json)
    at, counts = _numbers("--contexts", contexts), _numbers("--lanes", lanes)
    common = {"contexts": at, "lanes": counts}
    if "verify" in parts:
        verified = parse_model(shape)
        bench_verify(report, verified, device, **common, dtype=dtype, rounds=rounds)
    if "rounds" in parts:
        bench_rounds(report, shape, found, device, **common, dtype=dtype, rounds=rounds)
    if "servers" in parts:
        bench_servers(
            report,
            device,
            dtype=dtype,
            questions=questions,
            clients=clients,
            max_tokens=max_tokens,
            has_trees=ddtree,
        )
    if "edits" in parts:
        import asyncio  # not at the top: every --help would load it

        from luceasync.bench.edits import KIND_OF, bench_edits

        asked = {"kinds": _parts(kinds, [*KIND_OF], "--kinds"), "questions": questions}
        of: dict[str, Any] = {"dtype": dtype, "max_tokens": max_tokens, "draft": draft, **asked}
        asyncio.run(bench_edits(report, model, device, **of))


@bench_app.command()
def restore(
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Of memory,disk,killed.")
    ] = "memory,disk",
    shape: ShapeName = "small",
    device: Device = "cpu:0",
    tokens: Tokens = 4096,
    dtype: DtypeOption = "bf16",
    steps: Steps = 150,
    rounds: Rounds = 5,
    delays: Annotated[
        str, typer.Option(metavar="LIST", help="Seconds from an answer to the kill, for killed.")
    ] = "0,0.5,3",
    as_json: Json = False,
) -> None:
    """Kept prefixes: copies beside a stream, first tokens after a restart, losses when killed."""
    parts = _parts(only, ("memory", "disk", "killed"))
    from luceasync.bench.restore import bench_killed, bench_memory, bench_restart

    found = _shape(shape)
    report = _open_report([device], as_json)
    if "memory" in parts:
        bench_memory(report, found, device, dtype=dtype, tokens=tokens, steps=steps, rounds=rounds)
    if "disk" in parts:
        bench_restart(report, found, device, dtype=dtype, tokens=tokens, rounds=rounds)
    if "killed" in parts:
        bench_killed(report, delays=[float(part) for part in delays.split(",")], rounds=rounds)


@bench_app.command()
def paging(
    only: Annotated[str, typer.Option(metavar="LIST", help="Of decode,turns.")] = "decode,turns",
    shape: ShapeName = "small",
    device: Device = "cpu:0",
    context: Context = 8192,
    pool: Annotated[
        int, typer.Option(min=448, metavar="TOKENS", help="Tokens of a lane that stay.")
    ] = 1024,
    lanes: Annotated[int, typer.Option(min=1, metavar="N", help="Lanes that decode.")] = 4,
    dtype: DtypeOption = "bf16",
    steps: Steps = 128,
    rounds: Rounds = 3,
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of a conversation.")] = 3,
    memory: Annotated[int, typer.Option(min=1, metavar="GIB", help="Of nodes, for turns.")] = 2,
    restart: Annotated[
        bool, typer.Option("--restart", help="One more turn, by an engine that begins anew.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Lanes that hold a part of their context (KVFlash) beside lanes that hold all of it."""
    parts = _parts(only, ("decode", "turns"))
    from luceasync.bench.paging import PagingSetup, bench_decode, bench_turns

    setup = PagingSetup(_shape(shape), device, dtype, context, pool, lanes)
    report = _open_report([device], as_json)
    if "decode" in parts:
        bench_decode(report, setup, steps=steps, rounds=rounds)
    if "turns" in parts:
        bench_turns(report, setup, turns=turns, memory_bytes=memory << 30, restart=restart)


@bench_app.command()
def serve(
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Of overhead,live,beside,question,request,start.")
    ] = "overhead,live",
    model: Annotated[
        Path, typer.Option(metavar="PATH", help="Of the server, for all but overhead and live.")
    ] = BUNDLED_MODEL_DIR,
    device: Device = "cpu:0",
    dtype: ServerDtype = "auto",
    streams: Annotated[str, typer.Option(metavar="LIST", help="Streams at once.")] = "1,16",
    tokens: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of a stream.")] = 200,
    rate: Annotated[float, typer.Option(min=0.1, help="Steps per second, for overhead.")] = 50.0,
    turns: Annotated[int, typer.Option(min=1, metavar="N", help="For beside.")] = 6,
    sentences: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of each long prompt, for question.")
    ] = 250,
    rounds: Rounds = 5,
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another checkout, where --model is used.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The server's cost per token, event loop lag, a stream beside another conversation, how long
    a one-line question waits beside three long prompts, a request of one token, a start.
    """
    parts = _parts(only, ("overhead", "live", "beside", "question", "request", "start"))
    from luceasync.bench import serve_beside
    from luceasync.bench.serve import bench_live, bench_overhead

    counts = _numbers("--streams", streams)
    report = _open_report([device], as_json)
    if "overhead" in parts:
        bench_overhead(report, streams=counts, tokens=tokens, rate=rate)
    if "live" in parts:
        bench_live(report, streams=max(counts), tokens=tokens)
    where = report, model, device
    if "beside" in parts:
        most = min(tokens, 32)
        serve_beside.bench_beside(
            *where, turns=turns, tokens=most, dtype=dtype, rounds=rounds, against=against
        )
    if "question" in parts:
        serve_beside.bench_question(
            *where, sentences=sentences, dtype=dtype, rounds=rounds, against=against
        )
    if "request" in parts:
        serve_beside.bench_requests(*where, dtype=dtype, rounds=rounds, against=against)
    if "start" in parts:
        serve_beside.bench_starts(*where, dtype=dtype, rounds=rounds, against=against)


@bench_app.command()
def kernels(
    only: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Of gemv,quant,attention,chunks,experts,slots,copies; default: all but experts, "
            "slots; without a GPU copies.",
        ),
    ] = None,
    rows: Annotated[str, typer.Option(metavar="LIST", help="Rows of a product.")] = "1,16",
    contexts: Contexts = "1024,32768",
    lanes: Lanes = "1,4",
    tokens: Annotated[int, typer.Option(min=1, help="Of a node, for copies.")] = 2048,
    rounds: Rounds = 10,
    as_json: Json = False,
) -> None:
    """Kernels of a GPU beside its bandwidth; copies and hashes of nodes on the CPU."""
    kinds = ("gemv", "quant", "attention", "chunks", "copies")
    parts = _parts(only, (*kinds, "experts", "slots")) if only is not None else [*kinds]
    from luceasync.bench import kernels as measured
    from luceasync.bench.device import is_gpu
    from luceasync.pipeline.devices import default_device

    if only is None and not is_gpu(default_device()):
        parts = ["copies"]
    report = _open_report(["cpu:0"] if parts == ["copies"] else ["cuda:0"], as_json)
    counts = _numbers("--rows", rows)
    if "gemv" in parts:
        measured.bench_gemv(report, rows=counts, rounds=rounds)
    if "quant" in parts:
        measured.bench_quant(report, rows=counts, rounds=rounds)
    if "attention" in parts:
        at, num_lanes = _numbers("--contexts", contexts), _numbers("--lanes", lanes)
        measured.bench_attention(report, contexts=at, lanes=num_lanes, rounds=rounds)
    if "chunks" in parts:
        measured.bench_chunks(report, contexts=_numbers("--contexts", contexts), rounds=rounds)
    if "experts" in parts or "slots" in parts:
        from luceasync.bench.experts import bench_experts, bench_slots

        for part, bench in (("experts", bench_experts), ("slots", bench_slots)):
            if part in parts:
                bench(report, rows=counts, rounds=rounds)
    if "copies" in parts:
        measured.bench_copies(report, tokens=tokens, rounds=rounds)


@bench_app.command()
def ipc(
    only: Annotated[
        str, typer.Option(metavar="LIST", help="Of hops,processes.")
    ] = "hops,processes",
    transport: Annotated[
        Literal["shared", "stream"], typer.Option(help="Of payloads, for hops.")
    ] = "shared",
    hops: Annotated[int, typer.Option(min=1, metavar="N", help="Of a round.")] = 2000,
    chunks: Annotated[int, typer.Option(min=1, metavar="N", help="Of a round.")] = 20,
    shape: ShapeName = "small-hybrid",
    devices: Devices = "cpu:0,cpu:1",
    context: Context = 512,
    prompt: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="To prefill.")] = 512,
    lanes: Lanes = "1,4",
    dtype: DtypeOption = "bf16",
    steps: Steps = 16,
    rounds: Rounds = 5,
    as_json: Json = False,
) -> None:
    """Hops between two processes, and a model whose layers are in one process or in two."""
    parts = _parts(only, ("hops", "processes"))
    from luceasync.bench.ipc import bench_hops, bench_processes

    names = devices.split(",")
    report = _open_report(names, as_json)
    if "hops" in parts:
        bench_hops(report, transport=transport, hops=hops, chunks=chunks, rounds=rounds)
    if "processes" in parts:
        bench_processes(
            report,
            shape,
            _shape(shape),
            names,
            dtype=dtype,
            context=context,
            prompt=prompt,
            lanes=_numbers("--lanes", lanes),
            steps=steps,
            rounds=rounds,
        )


@bench_app.command()
def against(
    other: Annotated[Path, typer.Argument(metavar="DIR", help="Another checkout, at 8162231 on.")],
    device: Device = "cpu:0",
    models: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of bundled, engine and shapes; default: by the device."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: as a server.")] = None,
    context: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Default: 512, on a GPU 4096.")
    ] = None,
    rounds: Rounds = 15,
    lives: Annotated[int, typer.Option(min=1, metavar="N", help="Pairs of processes.")] = 1,
    as_json: Json = False,
) -> None:
    """Passes and answers of this checkout beside another one's, in one run."""
    from luceasync.bench.against import bench_against

    bench_against(
        _open_report([device], as_json),
        other,
        device,
        models=models.split(",") if models else (),
        dtype=dtype,
        context=context,
        rounds=rounds,
        lives=lives,
    )


@bench_app.command()
def check(
    only: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Benches, such as decode,kernels; default: all."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="Default: the first GPU, else cpu:0.")
    ] = None,
    tests: Annotated[
        bool | None, typer.Option(help="Run the GPU tests first; default: on a GPU.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Write this run's figures.")] = False,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Kept figures; default: docs/results/figures.json."),
    ] = None,
    as_json: Json = False,
) -> None:
    """The GPU tests and each bench in a short form, beside the figures kept for such a device.

    Exits with 1 if a test or bench fails or a figure is worse than its tolerance.
    """
    from luceasync.bench.check import BENCHES, KEPT_FILE, bench_check
    from luceasync.bench.device import is_gpu
    from luceasync.pipeline.devices import default_device

    parts = _parts(only, BENCHES) if only is not None else BENCHES
    name = device or default_device()
    report = _open_report([name], as_json)
    if tests and not is_gpu(name):
        raise ConfigError(f"--tests: they need a GPU, and --device is {name}")
    is_well = bench_check(
        report,
        name,
        only=parts,
        has_tests=is_gpu(name) if tests is None else tests,
        path=figures or KEPT_FILE,
        keeps=keep,
    )
    raise typer.Exit(0 if is_well else 1)


def _open_report(devices: Sequence[str], as_json: bool) -> Report:
    from luceasync.bench.device import open_report

    return open_report(devices, is_json=as_json)


def _models(text: str) -> list[BenchModel]:
    """Parse models. Raises ConfigError."""
    from luceasync.bench.model import parse_model

    return [parse_model(name) for name in text.split(",")]


def _shape(name: str) -> Shape:
    """Look up a shape. Raises ConfigError."""
    from luceasync.bench.shapes import SHAPES, shape_of

    try:
        return shape_of(name)
    except KeyError:
        allowed = ", ".join((*SHAPES, "small", "small-hybrid"))
        raise ConfigError(f"--shape {name}: unknown; allowed: {allowed}") from None


def _numbers(flag: str, text: str) -> list[int]:
    """Parse comma-separated numbers. Raises ConfigError."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{flag} {text}: expected integers with commas, such as 1,4") from None


def _parts(only: str, allowed: Sequence[str], flag: str = "--only") -> list[str]:
    """Parse the names of parts. Raises ConfigError."""
    parts = only.split(",")
    for part in parts:
        if part not in allowed:
            raise ConfigError(f"{flag} {part}: unknown; allowed: {', '.join(allowed)}")
    return parts
