"""Train the recall model: a small Qwen3 that answers questions about facts far back in a context.

Owns the recipe and the training loop; texts and network are in recall/. `--form full` needs one
CUDA GPU for two minutes, `--form small` a CPU for as long. `--resume` continues an earlier run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from training.recall.beginning import begin
from training.recall.facts import (
    EOS,
    LANGUAGES,
    MASK,
    PAD,
    Language,
    Writer,
    hop_places,
    value_places,
)
from training.recall.network import Network, Sizes

OTHERS_SHARE = 0.03  # weight of tokens that no question asks for
CHECK_STEPS = 5  # the end of a stage is checked, and the GPU waited for, after this many steps
SHOW_STEPS = 25
MEMORY = 0.6  # weight of the earlier checks in the running share of right values


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows of `row_tokens` with this many facts, questions and hops each, until the share `enough`
    of the values is right, for at most `most_steps`.
    """

    row_tokens: int
    num_rows: int
    num_facts: int
    num_questions: int
    num_hops: int
    enough: float
    most_steps: int


@dataclass(frozen=True, slots=True)
class Form:
    """A language, a network for it, and its training schedule.

    The learning rate is `peak_lr` until the last stage, in which it falls to `final_lr`; the last
    stage takes the rest of `seconds`.
    """

    language: Language
    sizes: Sizes
    stages: tuple[Stage, ...]
    seconds: float
    peak_lr: float = 2e-3
    final_lr: float = 1e-4
    warmup_steps: int = 30
    weight_decay: float = 0.05


FORMS = {
    "full": Form(
        LANGUAGES["full"],
        Sizes(
            LANGUAGES["full"].vocab_size,
            num_layers=6,
            hidden_size=256,
            intermediate_size=768,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            max_positions=131072,
        ),
        stages=(
            Stage(256, 512, 4, 10, 0, 0.97, 600),
            Stage(512, 256, 8, 20, 0, 0.97, 100),
            Stage(2048, 64, 32, 64, 2, 0.97, 100),
            Stage(8192, 16, 128, 192, 12, 0.97, 75),
            Stage(32768, 4, 512, 512, 50, 0.97, 50),
            Stage(65536, 2, 1000, 1000, 100, 1.1, 1000),
        ),
        seconds=100,
    ),
    "small": Form(
        LANGUAGES["small"],
        Sizes(
            LANGUAGES["small"].vocab_size,
            num_layers=2,
            hidden_size=64,
            intermediate_size=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_positions=8192,
        ),
        # Few questions for many facts: most are the first for their fact, and from far away.
        stages=(
            Stage(128, 32, 2, 5, 0, 0.97, 200),
            Stage(512, 8, 18, 9, 0, 0.97, 40),
            Stage(1024, 4, 36, 18, 0, 1.1, 70),
        ),
        seconds=400,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory that the model is written to")
    parser.add_argument("--form", choices=FORMS, default="full")
    parser.add_argument("--seconds", type=float, help="of training; default: the form's")
    parser.add_argument("--resume", type=Path, help="a model that an earlier run has written")
    parser.add_argument("--from-tokens", type=int, default=0, help="leave shorter rows out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    form = FORMS[args.form]
    form = replace(form, seconds=args.seconds or form.seconds)
    form = replace(form, stages=tuple(s for s in form.stages if s.row_tokens >= args.from_tokens))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    network = Network(form.sizes)
    begin(network)
    if args.resume:
        network.take(load_file(args.resume / "model.safetensors"))
    Training(form, network.to(device), args.seed, args.out).run()


class Training:
    """The training of one network, which is written to `out` after each stage."""

    def __init__(self, form: Form, network: Network, seed: int, out: Path) -> None:
        self._form = form
        self._network = network
        self._out = out
        self._device = network.embed_tokens.weight.device
        self._writer, self._random = Writer(form.language, seed), np.random.default_rng(seed)
        self._optimizer = _optimizer(form, network)
        self._step = 0
        self._begin_s = time.perf_counter()

    def run(self) -> None:
        """Train stage by stage, and print the progress."""
        for number, stage in enumerate(self._form.stages, 1):
            self._stage(stage, is_last=number == len(self._form.stages))
            export(self._network, self._form, self._out)

    def _stage(self, stage: Stage, *, is_last: bool) -> None:
        known, begin_s = 0.0, self._seconds()
        for step in range(stage.most_steps):
            share = (self._seconds() - begin_s) / max(self._form.seconds - begin_s, 1e-9)
            share = max(share, step / stage.most_steps)
            if share >= 1:
                break
            loss, right = self._learn(stage, share if is_last else 0.0)
            if self._step % CHECK_STEPS == 0:
                known = right.item() if not step else MEMORY * known + (1 - MEMORY) * right.item()
                if self._step % SHOW_STEPS == 0 or known >= stage.enough:
                    self._tell(stage, loss.item(), right.item())
                if known >= stage.enough:
                    break

    def _seconds(self) -> float:
        return time.perf_counter() - self._begin_s

    def _tell(self, stage: Stage, loss: float, right: float) -> None:
        told = f"{stage.row_tokens:6d} tokens, loss {loss:.3f}, right {right:.4f}"
        print(f"step {self._step:4d}: {told}, {self._seconds():.0f} s", flush=True)

    def _learn(self, stage: Stage, share: float) -> tuple[Tensor, Tensor]:
        """Run a step; `share` is the progress within the last stage."""
        rows = self._writer.rows(
            stage.num_rows, stage.row_tokens, stage.num_facts, stage.num_questions, stage.num_hops
        )
        for group in self._optimizer.param_groups:
            group["lr"] = _rate(self._form, self._step, share)
        with torch.autocast(self._device.type, torch.bfloat16, self._device.type == "cuda"):
            loss, right = self._loss(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._step += 1
        return loss.detach(), right

    def _loss(self, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """The loss over the requested values and a share of the other tokens, and the number of
        right values. Both stay on the device.
        """
        values = value_places(rows)[:, 1:]
        others = self._random.random(values.shape) < OTHERS_SHARE
        chosen = np.flatnonzero(values | hop_places(rows)[:, 1:] | others)
        is_value = values.reshape(-1)[chosen]
        tokens, places, counted = (
            torch.from_numpy(each).to(self._device) for each in (rows, chosen, is_value)
        )
        hidden = self._network(tokens)[:, :-1].flatten(0, 1)[places]
        targets = tokens[:, 1:].flatten()[places]
        logits = self._network.logits(hidden).float()
        right = ((logits.argmax(-1) == targets) & counted).sum() / counted.sum()
        return F.cross_entropy(logits, targets), right


def _optimizer(form: Form, network: Network) -> torch.optim.Optimizer:
    """AdamW; norms do not decay."""
    groups = [
        {"params": [p for p in network.parameters() if p.dim() > 1]},
        {"params": [p for p in network.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    decay = form.weight_decay
    return torch.optim.AdamW(groups, lr=form.peak_lr, betas=(0.9, 0.95), weight_decay=decay)


def _rate(form: Form, step: int, share: float) -> float:
    """A short warm-up, then constant, and half a cosine down in the last stage."""
    fall = 0.5 * (1 + math.cos(math.pi * share))
    rate = form.final_lr + (form.peak_lr - form.final_lr) * fall
    return rate * min(1.0, (step + 1) / form.warmup_steps)


def export(network: Network, form: Form, out: Path) -> None:
    """Write the model and its tokenizer, one word per token, as a Hugging Face directory."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(network.tensors(), out / "model.safetensors", {"format": "pt"})
    write_json(out / "config.json", form.sizes.config(EOS, PAD))
    words = form.language.words
    special = (PAD, EOS, MASK)  # a drafter gets the last one as a mask for tokens to predict
    vocab = {word if i in special else f"▁{word}": i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=words[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([words[i] for i in special])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}",
    }
    write_json(out / "tokenizer_config.json", settings)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
