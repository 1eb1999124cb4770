"""Measure the gain of a drafter on questions, with the real greedy loop.

The drafter runs as in the server; the target runs the whole text again for every round, which is
slow but has no state that could be wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash.draft import DraftNetwork, open_network
from luceasync.speculation.dflash.draft_config import adjusted, read_draft_spec
from training.draft.target import FrozenTarget
from training.draft.texts import Layout, read_lines


@dataclass(frozen=True, slots=True)
class Rounds:
    """`emitted` is the number of tokens of each round, including the bonus token; `ids` are prompt
    and answer.
    """

    ids: list[int]
    emitted: list[int]


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    target = FrozenTarget(args.target, dtype, device)
    spec = adjusted(
        read_draft_spec(args.draft, target.spec), block=args.block, ctx_max_tokens=args.ctx_max
    )
    lines = read_lines(args.questions)[: args.limit + args.earlier]
    layout = Layout(args.target, target.spec.eos_ids, 2**20)
    numbers = range(args.earlier, len(lines))
    prompts = [layout.prompt(behind(lines[n - args.earlier : n], lines[n])) for n in numbers]
    drafter = open_network(
        args.draft,
        spec,
        TorchOps(),
        lambda tokens: torch.nn.functional.embedding(tokens, target.embedding),
        num_lanes=1,
        max_ctx_tokens=max(map(len, prompts)) + args.max_tokens + spec.block,
        dtype=dtype,
        device=device,
    )
    rounds = [speculate(target, drafter, prompt, args.max_tokens) for prompt in prompts]
    lengths = sorted(map(len, prompts))
    print(f"prompts of {lengths[0]} to {lengths[-1]} tokens")
    report(rounds, spec.block)


def behind(earlier: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> dict[str, Any]:
    """The line's question in a conversation after the earlier questions and answers."""
    said = [
        message
        for each in earlier
        for message in (*each["messages"], {"role": "assistant", "content": each["answer"]})
    ]
    return {"messages": [*said, *line["messages"]]}


@torch.inference_mode()
def speculate(
    target: FrozenTarget, drafter: DraftNetwork, prompt: list[int], max_tokens: int
) -> Rounds:
    """A greedy answer of at most `max_tokens` tokens."""
    spec, stops = drafter.spec, target.spec.eos_ids
    lane = torch.zeros(1, dtype=torch.int64, device=target.device)
    features, choices = _run(target, spec.taps, prompt)
    ids, written, emitted = [*prompt, choices[-1]], 0, []
    while ids[-1] not in stops and len(ids) < len(prompt) + max_tokens:
        begin = len(ids) - 1
        drafter.write_context(
            features[:, written:begin], lane, lane + written, lane + begin - written
        )
        anchor = torch.tensor([ids[-1]], device=target.device)
        rows = drafter.propose(anchor, lane, lane + begin, spec.block)
        drafts = target.choices(rows)[0].tolist()
        features, choices = _run(target, spec.taps, ids + drafts)
        truth = choices[begin:]
        accepted = next((i for i, d in enumerate(drafts) if d != truth[i]), len(drafts))
        new = truth[: accepted + 1]
        stop = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))
        ids, written = ids + new[:stop], begin
        emitted.append(stop)
    return Rounds(ids, emitted)


def _run(
    target: FrozenTarget, taps: tuple[int, ...], ids: list[int]
) -> tuple[torch.Tensor, list[int]]:
    features, rows = target.run(torch.tensor([ids], device=target.device), taps)
    return features, target.choices(rows)[0].tolist()


def report(rounds: list[Rounds], block: int) -> None:
    """tau over all rounds, and how often a round emits at least a given number of tokens."""
    emitted = [count for each in rounds for count in each.emitted]
    print(f"{len(rounds)} questions, {sum(emitted)} tokens in {len(emitted)} rounds")
    print(f"tau {sum(emitted) / len(emitted):.3f} at block {block}")
    shares = [sum(count > k for count in emitted) / len(emitted) for k in range(block)]
    print("rounds that emit 1, 2, ... tokens or more: " + " ".join(f"{s:.3f}" for s in shares))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--target", type=Path, default=BUNDLED_MODEL_DIR)
    add("--draft", type=Path, default=BUNDLED_MODEL_DIR.with_name("stdlib-15m-dflash"))
    add("--questions", type=Path, default=BUNDLED_MODEL_DIR / "eval.jsonl")
    add("--limit", type=int, default=100, help="ask only the first questions")
    add("--earlier", type=int, default=0, help="questions asked and answered before each")
    add("--ctx-max", type=int, help="tokens that the drafter looks back on; default: its own limit")
    add("--block", type=int, help="rows of a proposal; default: the trained block")
    add("--max-tokens", type=int, default=256, help="most tokens of an answer")
    add("--dtype", choices=("fp32", "bf16"), default="fp32")
    add("--device", default="cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
