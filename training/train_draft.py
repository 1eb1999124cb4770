"""Train a DFlash drafter for a target that luceasync serves, and write it as a directory.

Owns the command line; texts, target, network and loop are in draft/. Needs a GPU for some minutes,
or a CPU for a toy.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import torch

from luceasync.models.files import read_spec
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.spec import ModelSpec
from luceasync.speculation.dflash.draft_config import default_taps
from luceasync.speculation.dflash.draft_spec import DraftLayerSpec, DraftSpec
from luceasync.text.tokenizer import Tokenizer
from training.draft import answers
from training.draft.network import Drafter
from training.draft.store import FeatureStore
from training.draft.target import FrozenTarget
from training.draft.texts import Layout, Text, read_lines, read_texts
from training.draft.training import Recipe, Run


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    spec = draft_spec(args, read_spec(args.target), Tokenizer.load(args.target))
    texts, asked = _texts(args, args.data), _texts(args, args.eval)
    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    target = FrozenTarget(args.target, dtype, device)
    texts += _own_answers(args, target)
    if not asked:
        asked, texts = texts[: args.held_out], texts[args.held_out :]
    store = _store(args, target, spec, texts, args.keep_tokens)
    asked_store = _store(args, target, spec, asked)
    asked_store.fill(asked)
    drafter = Drafter(spec, target.norm.weight).to(device)
    print(
        f"{len(texts)} texts, {len(asked)} held out, {spec.num_parameters} parameters", flush=True
    )
    recipe = Recipe(**{field.name: getattr(args, field.name) for field in fields(Recipe)})
    run = Run(recipe, drafter, target, out=args.out, state_path=args.resume)
    if args.compile:
        run.compile()
    run.train(store, texts, asked_store)


def draft_spec(args: argparse.Namespace, target: ModelSpec, tokenizer: Tokenizer) -> DraftSpec:
    """The drafter described by the arguments. Raises SystemExit for an invalid argument."""
    mask = args.mask_token
    mask = tokenizer.token_id("<|mask|>") if mask is None else mask
    if mask is None:
        raise SystemExit(
            "--mask-token: the target has no <|mask|>; name an id that texts never use"
        )
    taps = tuple(args.taps or default_taps(target.num_layers, args.layers))
    if not all(0 <= tap < target.num_layers for tap in taps):
        raise SystemExit(f"--taps {taps}: the target has layers 0 to {target.num_layers - 1}")
    layers = (DraftLayerSpec(args.window, args.window is not None),) * args.layers
    heads = (args.heads, args.kv_heads, args.head_dim, args.head_dim)
    return DraftSpec(
        hidden_size=target.hidden_size,
        intermediate_size=args.intermediate,
        norm_eps=1e-6,
        attention=AttentionSpec(*heads, rope_theta=args.rope_theta, gated=False),
        layers=layers,
        taps=taps,
        mask_token=mask,
        block=args.block,
        trained_block=args.block,
        ctx_max_tokens=args.row_tokens if args.window is None else None,
    )


def _texts(args: argparse.Namespace, path: Path | None) -> list[Text]:
    if path is None:
        return []
    eos_ids = Tokenizer.load(args.target).eos_ids
    return read_texts(path, args.target, eos_ids, args.row_tokens, args.workers)


def _own_answers(args: argparse.Namespace, target: FrozenTarget) -> list[Text]:
    """The target's own answers to the first prompts of the data."""
    if not args.answers:
        return []
    layout = Layout(args.target, Tokenizer.load(args.target).eos_ids, args.row_tokens)
    prompts = [layout.prompt(line) for line in read_lines(args.data)[: args.answers]]
    fitting = [prompt for prompt in prompts if len(prompt) <= args.row_tokens - args.answer_tokens]
    return answers.answer(target, fitting, args.answer_tokens, args.temperature)


def _store(
    args: argparse.Namespace,
    target: FrozenTarget,
    spec: DraftSpec,
    texts: list[Text],
    limit: int | None = None,
) -> FeatureStore:
    num_tokens = sum(len(text.ids) for text in texts)
    capacity = num_tokens if limit is None else min(limit, num_tokens)
    return FeatureStore(
        target, spec.taps, capacity=capacity, row_tokens=args.row_tokens, block=spec.block
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--target", type=Path, required=True, help="directory of the target model")
    add("--data", type=Path, required=True, help='lines of {"messages": [...]} or {"text": ...}')
    add("--eval", type=Path, help="the same for scoring; default: the first of the data")
    add("--held-out", type=int, default=128, help="texts to score on without --eval")
    add("--out", type=Path, required=True, help="directory to write")
    add("--resume", type=Path, help="file to go on from if it is there, and to keep a run in")
    add("--answers", type=int, default=0, help="add the target's own answers to so many lines")
    add("--answer-tokens", type=int, default=256, help="most tokens of such an answer")
    add("--temperature", type=float, default=0.0, help="of such answers; 0: greedy")
    add("--layers", type=int, default=5)
    add("--intermediate", type=int, required=True, help="inner size of the MLPs")
    add("--heads", type=int, required=True)
    add("--kv-heads", type=int, required=True)
    add("--head-dim", type=int, default=128)
    add("--rope-theta", type=float, default=1e6)
    add("--taps", type=int, nargs="+", help="target layers; default: the published rule")
    add("--block", type=int, default=16)
    add("--window", type=int, help="make all layers sliding ones")
    add("--mask-token", type=int, help="default: the id of <|mask|>")
    add("--row-tokens", type=int, default=512, help="most tokens of a text")
    add("--keep-tokens", type=int, default=2**24, help="features kept on the device at a time")
    add("--workers", type=int, default=1, help="processes that lay texts out")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=torch.cuda.is_available(),
        help="steps take two thirds of the time, but the first one a minute",
    )
    choices = {"optimizer": ("muon", "adamw"), "loss": ("dynamic", "decaying")}
    for field in fields(Recipe):
        kind = {"steps": int}.get(field.name) or type(field.default)
        name = "--" + field.name.replace("_", "-")
        add(name, type=kind, default=field.default, choices=choices.get(field.name))
    return parser.parse_args()


if __name__ == "__main__":
    main()
