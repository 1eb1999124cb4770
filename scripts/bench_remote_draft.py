"""Rounds of speculation with the drafter in a process of its own beside rounds with it in this one,
of one target, in turns; which rows are accepted is forced. Figures above 100 % are faster.

    python -m scripts.bench_remote_draft [--shape qwen3-4b --device cuda:0 --draft-device cuda:1]
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from luceasync.bench import command
from luceasync.bench.device import at_rest
from luceasync.bench.figures import medians, paired_ratio, spread
from luceasync.bench.model import DTYPES, load_random, plan_for
from luceasync.bench.report import figure, ms, share
from luceasync.bench.rounds import interleave
from luceasync.bench.shapes import SHAPES
from luceasync.config import Config
from luceasync.engine.acceptance import Acceptance
from luceasync.engine.decoding import anchors_of
from luceasync.engine.sequence import Generation
from luceasync.models.config import parse_spec, read_spec
from luceasync.models.precision import ITEM_BYTES, torch_dtype
from luceasync.models.spec import ModelSpec
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.plan import Plan
from luceasync.speculation.adapt import RoundPlan as StepPlan
from luceasync.speculation.adapt import Shape
from luceasync.speculation.dflash.draft_config import MASK_EMBEDDING, DraftSpec, read_draft_spec
from luceasync.speculation.dflash.draft_process import Berth
from luceasync.speculation.dflash.load import LoadedDraft, load_draft, start_draft
from luceasync.speculation.dflash.placement import Drafter, device_of, guest_of
from luceasync.speculation.speculator import Speculator
from scripts.bench_rounds import ACCEPTED, Forced, draft_config, started

BUNDLED = "bundled"
ROOT = Path(__file__).parents[1]
SHAPES_OF_ROUNDS = (Shape(16), Shape(8), Shape(16, 22))
NAMES = [f"block {s.block}" + (f", tree {s.budget}" if s.budget else "") for s in SHAPES_OF_ROUNDS]
HERE, THERE = "this process", "own process, "
NUM_WARMUPS = 6  # until graphs are captured
ROUNDS_A_SAMPLE = 4
MAX_TOKENS = 8192
NODE_BYTES = 64 << 20


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=20, device="cpu:0")
    parser.add_argument("--draft-device", help="default: --device")
    parser.add_argument("--shape", default=BUNDLED, choices=[BUNDLED, *sorted(SHAPES)])
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    parser.add_argument("--transports", type=command.names, default="shared,stream")
    parser.add_argument(
        "--program", type=Path, help="a luceasync-backend; default: this checkout's"
    )
    options = parser.parse_args()
    options.draft_device = options.draft_device or options.device
    report = command.begin(options, [options.device])
    with ExitStack() as closing, torch.inference_mode():
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        backend, drafts = load(options, folder, closing)
        for num_lanes in options.lanes:
            table = report.table(
                ["rounds", HERE, "spread", *[where for where in drafts if where != HERE]],
                f"{num_lanes} lanes at {options.context} tokens, a round",
            )
            tell(backend, drafts, num_lanes, options, table.add)


def tell(
    backend: LayerSplitBackend,
    drafts: dict[str, LoadedDraft],
    num_lanes: int,
    options: Namespace,
    add: Callable[..., None],
) -> None:
    """A row for each shape of rounds."""
    for name, shape in zip(NAMES, SHAPES_OF_ROUNDS, strict=True):
        runs = {}
        for number, (where, draft) in enumerate(drafts.items()):
            first = number * max(options.lanes)  # lanes of its own
            choices = started(backend, draft.speculator, num_lanes, options.context, first)
            runs[where] = rounds_of(draft.speculator, choices, shape)
        samples = interleave(runs, options.rounds, num_warmups=NUM_WARMUPS)
        here = samples[HERE]
        cells = [share(paired_ratio(here, samples[where])) for where in drafts if where != HERE]
        add(name, ms(medians(samples)[HERE], 2), figure(spread(here)), *cells)


def rounds_of(
    speculator: Speculator, choices: Sequence[Generation], shape: Shape
) -> Callable[[], float]:
    """Seconds of a round, of several in a row, until the drafter has taken up the last."""
    everyone = tuple(g.lane for g in choices if g.lane is not None)
    forced, plan = Forced(ACCEPTED), StepPlan(shape, everyone, is_measured=False)

    def run() -> None:
        for _ in range(ROUNDS_A_SAMPLE):
            forced.next_round()
            speculator.round(anchors_of(choices), plan, Acceptance(choices, forced))
        speculator.passes.probe()  # answered when it has done what it was told

    return lambda: at_rest(run) / ROUNDS_A_SAMPLE


def load(
    options: Namespace, folder: Path, closing: ExitStack
) -> tuple[LayerSplitBackend, dict[str, LoadedDraft]]:
    """The target, and its drafter by where it is."""
    config = Config()
    program = options.program or this_checkouts(folder)
    is_bundled = options.shape == BUNDLED
    shape = SHAPES.get(options.shape, {})
    if is_bundled:
        shape = json.loads((config.model.model_dir / "config.json").read_text(encoding="utf-8"))
    target = parse_spec(dict(shape))
    draft_dir = config.drafter_dir if is_bundled else folder / "draft"
    assert draft_dir is not None
    if not is_bundled:
        write_draft(draft_dir, target, draft_config(shape), torch_dtype(options.dtype))
    spec = read_draft_spec(draft_dir, target)
    there = device_of(program, options.draft_device, [])
    [device] = find_devices([options.draft_device], "--draft-device")
    plan = plan_for(
        shape,
        [options.device],
        parallel=max(options.lanes) * (1 + len(options.transports)),
        max_ctx_tokens=min(options.context + MAX_TOKENS, target.max_positions),
        dtype=options.dtype,
        verify_rows=[each.num_rows for each in SHAPES_OF_ROUNDS],
        guest=guest_of(spec, device, target, ITEM_BYTES[options.dtype]),
    )
    if plan.suits_one_thread:  # as the engine runs it
        torch.set_num_threads(1)
    backend = open_target(config, plan, shape, spec, is_bundled=is_bundled)
    closing.callback(backend.close)
    own = Drafter(draft_dir, spec, device, SHAPES_OF_ROUNDS)
    drafts = {HERE: load_draft(own, plan, backend)}
    closing.callback(drafts[HERE].close)
    for transport in options.transports:
        other = replace(own, device=there, program=program)
        berth = Berth(other, program, plan, transport, NODE_BYTES)
        closing.callback(berth.close)
        drafts[THERE + transport] = start_draft(berth, other, plan, backend)
        closing.callback(drafts[THERE + transport].close)
    return backend, drafts


def open_target(
    config: Config, plan: Plan, shape: dict[str, object], draft: DraftSpec, *, is_bundled: bool
) -> LayerSplitBackend:
    """With its own weights, or random ones."""
    if not is_bundled:
        return load_random(shape, plan, taps=draft.taps)
    spec = read_spec(config.model.model_dir)
    return LayerSplitBackend.open(config.model.model_dir, spec, plan, taps=draft.taps)


def write_draft(
    draft_dir: Path, target: ModelSpec, config: dict[str, object], dtype: torch.dtype
) -> None:
    """A drafter of random weights, as files."""
    draft_dir.mkdir()
    (draft_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(1)
    spec = read_draft_spec(draft_dir, target)
    tensors = {
        name: torch.randn(shape, generator=generator).mul_(0.02).to(dtype)
        for name, shape in spec.shapes.items()
        if name != MASK_EMBEDDING
    }
    save_file(tensors, draft_dir / "model.safetensors")


def this_checkouts(folder: Path) -> Path:
    """A luceasync-backend of this checkout and environment."""
    path = folder / "luceasync-backend"
    python = shlex.quote(sys.executable)
    path.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={shlex.quote(str(ROOT))}\n"
        f'exec {python} -m luceasync.backend "$@"\n',
        encoding="utf-8",
    )
    path.chmod(0o755)
    return path


if __name__ == "__main__":
    main()
