"""Train the recall model: a small Qwen3 that answers questions about facts far back in a context.

Owns the recipe and the training loop; texts are in recall/. `--form full` needs one CUDA GPU for a
minute or two, `--form small` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from recall.facts import EOS, LANGUAGES, PAD, Language, Writer, value_places
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

OTHERS_SHARE = 0.03  # of the tokens that are no asked values: they are learned a little


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows of `row_tokens` with so many facts and questions each, for `steps` steps."""

    row_tokens: int
    num_rows: int
    num_facts: int
    num_questions: int
    steps: int


@dataclass(frozen=True, slots=True)
class Form:
    """A language, a network for it and how it is taught."""

    language: Language
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    stages: tuple[Stage, ...]
    peak_lr: float = 2e-3
    final_lr: float = 3e-4
    warmup_steps: int = 20


FORMS = {
    "full": Form(
        LANGUAGES["full"],
        num_layers=6,
        hidden_size=256,
        intermediate_size=768,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        max_positions=131072,
        stages=(
            Stage(256, 512, 4, 10, 250),
            Stage(512, 256, 8, 20, 25),
            Stage(2048, 64, 32, 64, 25),
            Stage(8192, 16, 128, 192, 25),
            Stage(32768, 4, 512, 512, 25),
            Stage(65536, 2, 1000, 600, 150),
        ),
    ),
    "small": Form(
        LANGUAGES["small"],
        num_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=8192,
        stages=(Stage(128, 16, 3, 5, 3000),),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="directory that the model is written to")
    parser.add_argument("--form", choices=FORMS, default="full")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = FORMS[args.form]
    export(train(form, args.seed, device), form, args.out)


def network_of(form: Form) -> Qwen3ForCausalLM:
    """The untrained network, float32 on the CPU."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=form.language.vocab_size,
            hidden_size=form.hidden_size,
            intermediate_size=form.intermediate_size,
            num_hidden_layers=form.num_layers,
            num_attention_heads=form.num_heads,
            num_key_value_heads=form.num_kv_heads,
            head_dim=form.head_dim,
            max_position_embeddings=form.max_positions,
            rope_theta=1e7,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7},
            tie_word_embeddings=True,
            eos_token_id=EOS,
            pad_token_id=PAD,
        )
    )


def train(form: Form, seed: int, device: torch.device) -> Qwen3ForCausalLM:
    """Teach a network; tells how it goes. On a GPU it computes in bfloat16."""
    torch.manual_seed(seed)
    network = network_of(form).to(device)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=form.peak_lr, betas=(0.9, 0.95), weight_decay=0.05
    )
    writer, generator = Writer(form.language, seed), torch.Generator(device).manual_seed(seed)
    num_steps, step, begin = sum(stage.steps for stage in form.stages), 0, time.perf_counter()
    for stage in form.stages:
        for _ in range(stage.steps):
            rows = _rows(writer, stage)
            for group in optimizer.param_groups:
                group["lr"] = _rate(form, step, num_steps)
            tokens = torch.from_numpy(rows).to(device)
            places = torch.from_numpy(value_places(rows)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss, right = _loss(network, tokens, places, generator)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 25 == 0:
                seconds = time.perf_counter() - begin
                told = f"{stage.row_tokens:6d} tokens, loss {loss.item():.3f}, right {right:.3f}"
                print(f"step {step:4d}/{num_steps}: {told}, {seconds:.0f} s", flush=True)
    return network


def _rows(writer: Writer, stage: Stage) -> np.ndarray:
    rows = [
        writer.row(stage.row_tokens, stage.num_facts, stage.num_questions)
        for _ in range(stage.num_rows)
    ]
    return np.stack(rows)


def _rate(form: Form, step: int, num_steps: int) -> float:
    """Up in a few steps, then down along a cosine."""
    if step < form.warmup_steps:
        return form.peak_lr * (step + 1) / form.warmup_steps
    share = (step - form.warmup_steps) / max(1, num_steps - form.warmup_steps)
    fall = 0.5 * (1 + math.cos(math.pi * share))
    return form.final_lr + (form.peak_lr - form.final_lr) * fall


def _loss(
    network: Qwen3ForCausalLM, tokens: Tensor, places: Tensor, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Over asked values and a share of the other tokens; and how many of the values are right."""
    hidden = network.model(tokens).last_hidden_state[:, :-1]
    wanted, asked = tokens[:, 1:], places[:, 1:]
    others = torch.rand(wanted.shape, device=tokens.device, generator=generator) < OTHERS_SHARE
    chosen = asked | others
    logits = network.lm_head(hidden[chosen]).float()
    targets = wanted[chosen]
    is_value = asked[chosen]
    right = (logits.argmax(-1) == targets)[is_value].float().mean().item()
    return F.cross_entropy(logits, targets), right


def export(network: Qwen3ForCausalLM, form: Form, out: Path) -> None:
    """Write the model and its tokenizer, a word a token, as a Hugging Face directory."""
    network.to(torch.bfloat16).save_pretrained(out)
    words = form.language.words
    vocab = {word if i in (PAD, EOS) else f"▁{word}": i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=words[PAD]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([words[PAD], words[EOS]])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{% for m in messages %}{{ m.content }} {% endfor %}",
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
