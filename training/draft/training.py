"""The training loop of a drafter: batches, loss, optimizers, schedule, checkpoints.

Owns the recipe. The target is frozen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.draft import losses
from training.draft.evaluation import Score, draft, evaluate
from training.draft.export import load_run, save_run, write_draft, write_json
from training.draft.muon import Muon
from training.draft.network import Drafter
from training.draft.store import Batch, FeatureStore
from training.draft.target import FrozenTarget
from training.draft.texts import Text

NUM_COMPILING_STEPS = 3  # not counted as training time
SHOW_STEPS = 100


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train: for `seconds`, or for `steps` if given.

    A step takes `num_anchors` anchors from each of `num_rows` rows. `short_share` of the blocks are
    shorter than the drafter's, as under load. Slots are scored among the tokens of answers and
    `other_tokens` others, or in all of the vocabulary if that is 0. If the store cannot hold all
    texts, they are replaced every `refill_steps`.
    """

    seconds: float = 300.0
    steps: int | None = None
    num_rows: int = 128
    num_anchors: int = 64
    short_share: float = 0.5
    other_tokens: int = 0
    peak_lr: float = 2.5e-3
    optimizer: str = "muon"
    loss: str = "dynamic"
    gamma: float = 4.0
    refill_steps: int = 500
    checkpoint_s: float = 60.0
    warmup_steps: int = 100
    final_lr_share: float = 0.01
    weight_decay: float = 0.05
    seed: int = 20261121


class Run:
    """One training run. `out` is the folder for results, `state_path` the file for its state, if
    given.
    """

    def __init__(
        self,
        recipe: Recipe,
        drafter: Drafter,
        target: FrozenTarget,
        *,
        out: Path,
        state_path: Path | None = None,
    ) -> None:
        self._recipe = recipe
        self._drafter = drafter
        self._target = target
        self._out = out
        self._state_path = state_path
        self._optimizers = make_optimizers(drafter, recipe)
        self._step = 0
        self._elapsed_s = 0.0
        self._scores: list[dict[str, Any]] = []
        self._slot_losses = losses.slot_losses
        if state_path and state_path.exists():
            progress = load_run(state_path, drafter, self._optimizers)
            self._step, self._elapsed_s = progress["step"], progress["elapsed_s"]
            self._scores = progress["scores"]
            print(f"going on from step {self._step}", flush=True)

    def compile(self) -> None:
        """Compile the functions in which a step spends its time."""
        for layer in self._drafter.layers:
            layer.compile()
        self._slot_losses = torch.compile(losses.slot_losses)

    def train(self, store: FeatureStore, texts: Sequence[Text], asked: FeatureStore) -> Score:
        """Train on `texts` through `store`. Returns the final score on `asked`."""
        recipe = self._recipe
        generator = torch.Generator(store.device).manual_seed(recipe.seed + self._step)
        choices = self._choices(texts) if recipe.other_tokens else None
        cursor, first = 0, self._step
        started, saved = time.monotonic(), time.monotonic()
        before_s = self._elapsed_s
        while (progress := self._progress()) < 1:
            if self._step == first or (self._step - first) % recipe.refill_steps == 0:
                cursor = self._refill(store, texts, cursor)
            batch = store.draw(recipe.num_rows, recipe.num_anchors, recipe.short_share, generator)
            head, blocks = self._target.head, batch.blocks
            if choices is not None:
                head, blocks = choices.draw(blocks, generator)
            loss = self._learn(batch, head, blocks, progress)
            self._step += 1
            if self._step - first <= NUM_COMPILING_STEPS:
                print(f"step {self._step} loss {loss.item():.4f}", flush=True)
                started = saved = time.monotonic()
            elif self._step % SHOW_STEPS == 0:
                print(
                    f"step {self._step} loss {loss.item():.4f} {self._elapsed_s:.0f} s", flush=True
                )
            self._elapsed_s = before_s + time.monotonic() - started
            if time.monotonic() - saved > recipe.checkpoint_s:
                self.checkpoint(asked)
                saved = time.monotonic()
        return self.checkpoint(asked)

    def checkpoint(self, asked: FeatureStore) -> Score:
        """Score the drafter and write it to disk."""
        recipe, drafter = self._recipe, self._drafter
        with torch.compiler.set_stance("force_eager"):
            score = evaluate(drafter, self._target, asked, recipe.num_rows, recipe.num_anchors)
        print(f"step {self._step} {score}", flush=True)
        self._scores.append(
            {"step": self._step, "seconds": round(self._elapsed_s, 1), "tau": round(score.tau, 3)}
            | {"slots": [round(slot, 3) for slot in score.slots]}
        )
        write_draft(drafter, self._target.spec, self._out)
        write_json(self._out / "training.json", self.record())
        if self._state_path:
            progress = {"step": self._step, "elapsed_s": self._elapsed_s, "scores": self._scores}
            save_run(self._state_path, drafter, self._optimizers, progress)
        return score

    def record(self) -> dict[str, Any]:
        """The figures of the run so far."""
        recipe = self._recipe
        return {
            "num_parameters": sum(p.numel() for p in self._drafter.parameters()),
            "steps": self._step,
            "seconds": round(self._elapsed_s, 1),
            "anchors": self._step * recipe.num_rows * recipe.num_anchors,
            "optimizer": recipe.optimizer,
            "peak_lr": recipe.peak_lr,
            "loss": recipe.loss,
            "scores": self._scores,
        }

    def _progress(self) -> float:
        if self._recipe.steps is not None:
            return self._step / self._recipe.steps
        return self._elapsed_s / self._recipe.seconds

    def _refill(self, store: FeatureStore, texts: Sequence[Text], cursor: int) -> int:
        """Fill the store with the texts from `cursor` on, cyclically. Returns the next cursor."""
        if len(store.begins) == len(texts):
            return 0  # it holds all texts
        begun = time.monotonic()
        count = store.fill([*texts[cursor:], *texts[:cursor]])
        print(
            f"{count} texts; the target agrees with {store.agreement:.1%} of what it is to have "
            f"said; {time.monotonic() - begun:.0f} s",
            flush=True,
        )
        return (cursor + count) % len(texts)

    def _choices(self, texts: Sequence[Text]) -> losses.Choices:
        known = np.unique(np.concatenate([text.ids[text.said] for text in texts]))
        head = self._target.head
        places = torch.from_numpy(known.astype(np.int64)).to(head.device)
        return losses.Choices(head, places, self._recipe.other_tokens)

    def _learn(self, batch: Batch, head: Tensor, blocks: Tensor, progress: float) -> Tensor:
        """Run one step and return its loss, still on the device. `blocks` are the batch's, as
        places in `head`.
        """
        recipe, drafter, target = self._recipe, self._drafter, self._target
        rate = learning_rate(recipe, self._step, progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
        rows = draft(drafter, target, batch)
        slots = self._slot_losses(rows, head, blocks)
        weights = losses.slot_weights(recipe.loss, slots, batch.counted, recipe.gamma)
        loss = losses.weighted_mean(slots, weights, batch.counted)
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.detach()


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Linear warm-up, then half a cosine down to `final_lr_share` of the peak."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    share = recipe.final_lr_share + (1 - recipe.final_lr_share) * cosine
    return recipe.peak_lr * min(1.0, (step + 1) / recipe.warmup_steps) * share


def make_optimizers(drafter: Drafter, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon or AdamW for the matrices, AdamW without decay for the norms."""
    parameters = list(drafter.parameters())
    matrices = [p for p in parameters if p.dim() == 2]
    norms = [p for p in parameters if p.dim() != 2]
    adam = {"lr": recipe.peak_lr, "betas": (0.9, 0.95), "fused": True}
    if recipe.optimizer == "muon":
        first = Muon(matrices, recipe.peak_lr, recipe.weight_decay)
    else:
        first = torch.optim.AdamW(matrices, weight_decay=recipe.weight_decay, **adam)
    return [first, torch.optim.AdamW(norms, weight_decay=0.0, **adam)]
