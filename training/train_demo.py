"""Train the bundled model, stdlib-15m, from scratch on the docstrings of the running Python.

Owns the recipe and the training loop; corpus, network and files are in demo/. Needs one CUDA GPU
for about six minutes; `--smoke` trains a toy of the same shape on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from training.demo import evaluation
from training.demo.corpus import Corpus, collect
from training.demo.dialogue import Dialogue
from training.demo.export import export, train_tokenizer, write_json
from training.demo.network import Network, NetworkConfig
from training.demo.rows import Rows

SEED = 20261121
SMOKE_MODULES = frozenset({"bisect", "json", "shlex", "textwrap"})


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train: for `seconds`, or for `steps` if given."""

    seconds: float = 285.0
    steps: int | None = None
    num_rows: int = 32
    row_tokens: int = 2048
    peak_lr: float = 2.5e-3
    final_lr_share: float = 0.01
    warmup_steps: int = 100
    weight_decay: float = 0.05
    num_workers: int = 10


def main() -> None:
    args = _arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers are forked
    recipe, config = Recipe(seconds=args.seconds, steps=args.steps), NetworkConfig()
    if args.smoke:
        recipe = Recipe(steps=30, num_rows=4, row_tokens=256, warmup_steps=5, num_workers=1)
        config = NetworkConfig(
            vocab_size=640,
            hidden_size=64,
            intermediate_size=128,
            num_layers=4,
            head_dim=16,
            linear_head_dim=16,
        )
    corpus = collect(SMOKE_MODULES if args.smoke else None)
    dialogue = Dialogue(corpus)
    tokenizer = train_tokenizer(_tokenizer_texts(corpus, dialogue), config.vocab_size)
    config = replace(config, vocab_size=tokenizer.get_vocab_size())
    print(f"{len(corpus.items)} names, vocabulary {config.vocab_size}", flush=True)
    network, record = train(dialogue, tokenizer, config, recipe, torch.device(args.device))
    export(network, tokenizer, args.out)
    write_json(args.out / "training.json", {**_provenance(corpus, args.device), **record})
    evaluation.write_entries(args.out / "eval.jsonl", evaluation.held_out_entries(dialogue, SEED))
    evaluation.write_entries(
        args.out / "dialogue.jsonl", evaluation.dialogue_entries(dialogue, SEED)
    )


def train(
    dialogue: Dialogue,
    tokenizer: Tokenizer,
    config: NetworkConfig,
    recipe: Recipe,
    device: torch.device,
) -> tuple[Network, dict[str, float]]:
    """Train a new network. Returns it with the figures of the run."""
    torch.manual_seed(SEED)
    torch.set_float32_matmul_precision("high")
    network = Network(config).to(device)
    num_parameters = sum(p.numel() for p in network.parameters())
    if device.type == "cuda":
        for layer in network.layers:  # two graphs for twelve layers, instead of one large one
            layer.compile()
    optimizer = _optimizer(network, recipe)
    step, num_tokens, started, elapsed_s = 0, 0, time.monotonic(), 0.0
    for tokens, learnt in _batches(dialogue, tokenizer, recipe, device):
        progress = step / recipe.steps if recipe.steps else elapsed_s / recipe.seconds
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step, progress)
        loss = _step(network, optimizer, tokens, learnt)
        step += 1
        num_tokens += learnt[:, 1:].numel()
        if step <= 3:  # compilation does not count as training time
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            started = time.monotonic()
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f} {elapsed_s:.0f} s", flush=True)
        elapsed_s = time.monotonic() - started
    return network, {
        "num_parameters": num_parameters,
        "steps": step,
        "tokens": num_tokens,
        "row_tokens": recipe.row_tokens,
        "seconds": round(elapsed_s, 1),
        "final_loss": round(loss.item(), 4),
    }


def _step(
    network: Network, optimizer: torch.optim.Optimizer, tokens: Tensor, learnt: Tensor
) -> Tensor:
    """Run one optimizer step. Returns the loss, still on the device."""
    loss = _loss(network, tokens, learnt)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Linear warm-up, then half a cosine down to `final_lr_share` of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    share = recipe.final_lr_share + (1 - recipe.final_lr_share) * cosine
    return recipe.peak_lr * min(1.0, (step + 1) / recipe.warmup_steps) * share


def _loss(network: Network, tokens: Tensor, learnt: Tensor) -> Tensor:
    """Mean cross-entropy over the learnt tokens; both arguments [rows, row_tokens + 1]."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = network(tokens[:, :-1])
    targets = tokens[:, 1:].masked_fill(~learnt[:, 1:], -100)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100)


def _batches(
    dialogue: Dialogue, tokenizer: Tokenizer, recipe: Recipe, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    rows = Rows(dialogue, tokenizer, recipe.num_rows, recipe.row_tokens, SEED)
    loader = DataLoader(
        rows,
        batch_size=None,
        num_workers=recipe.num_workers,
        prefetch_factor=4,
        pin_memory=device.type == "cuda",
    )
    for tokens, learnt in loader:
        yield tokens.to(device, non_blocking=True).long(), learnt.to(device, non_blocking=True)


def _optimizer(network: Network, recipe: Recipe) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    parameters = list(network.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=(0.9, 0.95), fused=True)


def _tokenizer_texts(corpus: Corpus, dialogue: Dialogue) -> Iterator[str]:
    """Every answer once, and enough conversations to cover the words of the questions."""
    for item in corpus.items:
        yield item.answer
        yield "\n\n".join(item.parts[1:])
    rng = random.Random(SEED)
    for _ in range(len(corpus.items)):
        yield "\n".join(text for role, text in dialogue.draw(rng) if role == "user")


def _provenance(corpus: Corpus, device: str) -> dict[str, object]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": SEED,
        "num_names": len(corpus.items),
        "unimportable_modules": list(corpus.unimportable),
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seconds", type=float, default=Recipe.seconds, help="training time")
    parser.add_argument("--steps", type=int, help="train this many steps instead")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy run that only shows that all parts work"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


if __name__ == "__main__":
    main()
