"""The shipped drafter is complete, small, fits the shipped model, and proposes what it says."""

import json

import pytest
import torch
from safetensors import safe_open

from luceasync.config import BUNDLED_DRAFT_DIR, BUNDLED_MODEL_DIR
from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import adjusted, read_draft_spec
from training.draft.target import FrozenTarget
from training.draft.texts import Layout, read_lines
from training.eval_draft import speculate

MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def spec():
    return read_draft_spec(BUNDLED_DRAFT_DIR, read_spec(BUNDLED_MODEL_DIR))


def test_the_directory_is_complete_and_small():
    sizes = {path.name: path.stat().st_size for path in BUNDLED_DRAFT_DIR.iterdir()}
    assert sizes.keys() == {"README.md", "config.json", "model.safetensors", "training.json"}
    assert sum(sizes.values()) <= MAX_BYTES


def test_the_weights_are_those_of_the_config(spec):
    with safe_open(BUNDLED_DRAFT_DIR / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert sum(tensor.numel() for tensor in tensors.values()) == spec.num_parameters
    assert all(tensor.dtype is torch.bfloat16 for tensor in tensors.values())
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_it_looks_back_as_far_as_it_was_trained_to(spec):
    assert spec.ctx_max_tokens == 512


def test_the_mask_token_is_the_models_own(spec):
    tokenizer = json.loads((BUNDLED_MODEL_DIR / "tokenizer.json").read_text())
    names = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    assert names[spec.mask_token] == "<|mask|>"


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(BUNDLED_MODEL_DIR, torch.float32, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(("block", "tau", "num_lines"), [(16, 11.0, 2), (8, 6.5, 1), (4, 3.5, 1)])
def test_most_of_what_it_proposes_is_accepted(spec, target, block, tau, num_lines):
    spec = adjusted(spec, block=block)
    layout = Layout(BUNDLED_MODEL_DIR, target.spec.eos_ids, max_tokens=4096)
    drafter = open_network(
        BUNDLED_DRAFT_DIR,
        spec,
        TorchOps(),
        lambda tokens: torch.nn.functional.embedding(tokens, target.embedding),
        num_lanes=1,
        max_ctx_tokens=512,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    lines = read_lines(BUNDLED_MODEL_DIR / "eval.jsonl")[:num_lines]
    rounds = [speculate(target, drafter, layout.prompt(line), 128) for line in lines]
    emitted = [count for each in rounds for count in each.emitted]
    assert sum(emitted) / len(emitted) > tau
