"""Verify passes beside decode steps on a GPU, of well-known shapes with random weights.

    python -m scripts.bench_verify [--shapes qwen3-4b,qwen3.5-4b] [--contexts 1024,32768]

A round is what speculation costs the target: verify a proposal, bring the best tokens to the host,
commit a path. Rounds and decode steps alternate in one run; ratios are of their medians.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from luceasync.bench import command
from luceasync.bench.device import copy_bandwidth, synchronize
from luceasync.bench.figures import medians
from luceasync.bench.model import Decoding, load_random, plan_for, prefill, random_prompt
from luceasync.bench.report import Cell, ms
from luceasync.bench.rounds import Run, measure
from luceasync.bench.shapes import SHAPES, step_bytes
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.platform import open_platform
from luceasync.ranking.logits import Wanted

NUM_ACCEPTED = 6  # rows of a path, where the proposal is that deep
DECODE = "decode"


@dataclass(frozen=True)
class Proposal:
    """Rows to verify: a chain, or a tree whose rows hang on random earlier ones."""

    name: str
    parents: tuple[int, ...]

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))

    @property
    def path(self) -> list[int]:
        """The first rows of the deepest path."""
        paths: list[list[int]] = []
        for row, parent in enumerate(self.parents):
            paths.append([row] if parent == ROOT else [*paths[parent], row])
        return max(paths, key=len)[:NUM_ACCEPTED]


def chain_of(num_rows: int) -> Proposal:
    return Proposal(f"chain of {num_rows}", tuple(range(ROOT, num_rows - 1)))


def tree_of(num_rows: int) -> Proposal:
    """Bushy at its root, as trees of the likeliest continuations are."""
    choose = random.Random(num_rows)
    parents = (ROOT, *(min(row - 1, choose.randrange(12)) for row in range(1, num_rows)))
    return Proposal(f"tree of {num_rows}", parents)


PROPOSALS = (chain_of(8), chain_of(16), tree_of(22), tree_of(60))


def main() -> None:
    """Measure and print."""
    parser = command.parser(__doc__, rounds=37, device="cuda:0")
    parser.add_argument("--shapes", type=command.names, default="qwen3-4b,qwen3.5-4b")
    parser.add_argument("--contexts", type=command.numbers, default="1024,32768")
    parser.add_argument("--lanes", type=command.numbers, default="1,4")
    options = parser.parse_args()
    report = command.begin(options, [options.device])
    copy_bytes_per_s = copy_bandwidth(options.device)
    report.say(f"Copy bandwidth {copy_bytes_per_s / 1e9:.0f} GB/s.")
    names = [proposal.name for proposal in PROPOSALS]
    table = report.table(["shape", "lanes, context", DECODE, "limit", *names])
    contexts, lanes = sorted(options.contexts), options.lanes
    for name in options.shapes:
        shape = SHAPES[name]
        plan = plan_for(
            shape,
            [options.device],
            parallel=max(lanes),
            max_ctx_tokens=contexts[-1] + 256,
            verify_rows=[len(proposal.parents) for proposal in PROPOSALS],
        )
        backend = load_random(shape, plan)
        prompt = random_prompt(contexts[-1])
        for context in contexts:
            for lane in range(max(lanes)):
                prefill(backend, lane, prompt[:context])
            for num_lanes in lanes:
                limit_s = step_bytes(shape, plan, num_lanes, context) / copy_bytes_per_s
                runs = passes(backend, options.device, num_lanes, context)
                seconds = medians(measure(runs, options.rounds, num_warmups=3))
                decode_s = seconds.pop(DECODE)
                cells = [
                    Cell(s / decode_s, f"{s * 1e3:.2f} ms, {s / decode_s:.2f}")
                    for s in seconds.values()
                ]
                place = f"{num_lanes} at {context}"
                table.add(name, place, ms(decode_s, 2), ms(limit_s, 2), *cells)
        backend.close()


def passes(backend: LayerSplitBackend, device: str, num_lanes: int, context: int) -> dict[str, Run]:
    """A decode step, and a round of every proposal until all of it is done."""

    def waited(run: Run) -> Run:
        return lambda: (run(), synchronize())

    rounds = {
        proposal.name: waited(round_of(proposal, backend, device, num_lanes, context))
        for proposal in PROPOSALS
    }
    return {DECODE: Decoding(backend, num_lanes, context), **rounds}


def round_of(
    proposal: Proposal, backend: LayerSplitBackend, device: str, num_lanes: int, context: int
) -> Run:
    """Verify, bring the best tokens to the host, queue the commit of a path: another one may
    follow, at the same place.
    """
    lanes, begins = list(range(num_lanes)), [context] * num_lanes
    place = open_platform(device).device
    shape = (num_lanes, len(proposal.parents))
    tokens = torch.randint(10, 1000, shape, device=place)
    parents = None
    if not proposal.is_chain:  # of a chain a drafter names none
        parents = torch.tensor(proposal.parents, dtype=torch.int32, device=place)
        parents = parents.expand(shape).contiguous()
    paths = [proposal.path] * num_lanes

    @torch.inference_mode()  # as luceasync.speculation.speculator.Speculator runs one
    def run() -> object:
        logits = backend.verify(lanes, begins, tokens, parents)
        best = logits.rank(Wanted()).candidates().best.tolist()
        backend.commit(paths)
        return best

    return run


if __name__ == "__main__":
    main()
