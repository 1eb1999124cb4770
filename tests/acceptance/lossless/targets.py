"""The models that are asked, and their questions."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from functools import partial
from pathlib import Path

from luceasync.config import BUNDLED_DRAFT_DIR, BUNDLED_MODEL_DIR
from luceasync.models.files import read_spec
from luceasync.speculation.dflash.draft_config import read_draft_spec
from tests.acceptance.lossless.cases import Target


def bundled(folder: Path, num_prompts: int) -> Target:
    """The bundled model with its drafter and its evaluation questions."""
    lines = (BUNDLED_MODEL_DIR / "eval.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["messages"][-1]["content"] for line in lines]
    questions = tuple((a, texts[i - 1]) for i, a in enumerate(texts))[:num_prompts]
    block = read_draft_spec(BUNDLED_DRAFT_DIR, read_spec(BUNDLED_MODEL_DIR)).block
    return Target(
        "qwen3_5, stdlib-15m with its drafter",
        *(BUNDLED_MODEL_DIR, BUNDLED_DRAFT_DIR, block, questions, 64, {}),
    )


def tiny_target(folder: Path, num_prompts: int, family: str, *, is_scripted: bool) -> Target:
    """A model of random weights that answers in letters."""
    from luceasync.text.tokenizer import Tokenizer
    from tests import tiny

    model_dir = tiny.save(tiny.build(family), folder / "target")
    draft_dir = tiny.save_draft(folder / "draft", tiny.draft_config())
    choice = random.Random(5)
    words = ["".join(choice.choices(string.ascii_lowercase, k=5)) for _ in range(400)]
    questions = tuple(
        (" ".join(choice.sample(words, 12)), " ".join(choice.sample(words, 4)))
        for _ in range(num_prompts)
    )
    encode = Tokenizer.load(model_dir).encode
    # No more than it takes: sums of large numbers are rounded to steps, and equal within one.
    bias = {encode(letter)[0]: 16.0 for letter in string.ascii_lowercase}
    proposed = "scripted proposals" if is_scripted else "a random drafter"
    return Target(
        f"{family}, random weights with {proposed}",
        *(model_dir, draft_dir, 8, questions, 40 if is_scripted else 16, bias, is_scripted),
    )


def drafting_itself(folder: Path, num_prompts: int, drafters: tuple[str, ...]) -> Target:
    """A tiny Qwen3.5 that needs no other weights: it has a head that drafts, and mostly says of a
    token the same next one, so that texts repeat what stands in them.
    """
    from tests.speculation import mtp_models

    model_dir = mtp_models.save(folder / "target", cycle=8)
    choice = random.Random(5)
    words = ["".join(choice.choices(string.ascii_lowercase, k=5)) for _ in range(400)]
    questions = tuple(
        (" ".join(choice.sample(words, 12)), " ".join(choice.sample(words, 4)))
        for _ in range(num_prompts)
    )
    return Target(
        f"qwen3_5, random weights with {' and '.join(drafters)}",
        *(model_dir, "mtp" if "mtp" in drafters else "lookup", 4, questions, 40, {}),
        drafters=drafters,
    )


def chosen_by_selector(folder: Path, num_prompts: int) -> Target:
    """The same model with a DFlash2 drafter whose selector knows what follows each token."""
    from tests import tiny
    from tests.speculation import dflash2_models, mtp_models

    target = drafting_itself(folder, num_prompts, ("mtp",))
    successors = mtp_models.successors(0, cycle=8)
    draft_dir = dflash2_models.save(folder / "draft", target.model_dir, successors)
    return replace(
        target,
        name="qwen3_5, random weights with a DFlash2 drafter",
        draft_dir=draft_dir,
        block=tiny.DRAFT["block_size"],
        drafters=("dflash",),
    )


MAKERS = {
    "bundled": bundled,
    "random": partial(tiny_target, family="qwen3", is_scripted=False),
    "scripted": partial(tiny_target, family="qwen3", is_scripted=True),
    "scripted-qwen3_5": partial(tiny_target, family="qwen3_5", is_scripted=True),
    "dflash2": chosen_by_selector,
    "mtp": partial(drafting_itself, drafters=("mtp",)),
    "lookup": partial(drafting_itself, drafters=("lookup",)),
    "mtp-lookup": partial(drafting_itself, drafters=("mtp", "lookup")),
}
