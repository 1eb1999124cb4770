"""Tokens that a generation_config suppresses are never chosen, on whichever shard the head is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.files import read_spec
from luceasync.models.precision import Precision
from luceasync.prefix_cache.namespace import namespace_of
from tests import tiny
from tests.gguf.files import header, qwen3_keys, qwen3_tensors, save

PROMPT = [5, 6, 7]


def suppress(model_dir: Path, ids: object) -> None:
    (model_dir / "generation_config.json").write_text(json.dumps({"suppress_tokens": ids}))


def test_they_have_no_chance_in_any_pass(tmp_path: Path, make_backend):
    path = tiny.save(tiny.build("qwen3"), tmp_path)
    best, next_best = (
        make_backend(path).prefill(0, 0, PROMPT, project=True).flatten().topk(2).indices.tolist()
    )
    suppress(path, [best])
    for num_shards in (1, 3):
        backend = make_backend(path, num_shards=num_shards, verify_rows=(2,))
        logits = backend.prefill(0, 0, PROMPT, project=True).flatten()
        assert (logits[best], int(logits.argmax())) == (-torch.inf, next_best)
        logits = backend.verify([0], [3], torch.tensor([[8, 9]])).whole()[0]
        assert (logits[:, best] == -torch.inf).all()
        assert backend.decode([0], [3], [8]).whole()[0, best] == -torch.inf


def test_their_logits_are_kept_in_a_namespace_of_their_own(tmp_path: Path, tiny_dir: Path):
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    plain = namespace_of([], read_spec(tmp_path), Precision.of("fp32"), None)
    suppress(tmp_path, [])
    assert namespace_of([], read_spec(tmp_path), Precision.of("fp32"), None) == plain
    suppress(tmp_path, [7])
    assert namespace_of([], read_spec(tmp_path), Precision.of("fp32"), None) != plain


@pytest.mark.parametrize("ids", [5, [512], [-1], ["5"], [True]])
def test_they_are_a_list_of_ids(tmp_path: Path, tiny_dir: Path, ids: object):
    (tmp_path / "config.json").write_bytes((tiny_dir / "config.json").read_bytes())
    suppress(tmp_path, ids)
    with pytest.raises(ModelError, match=r"generation_config\.json: suppress_tokens = "):
        read_spec(tmp_path)


def test_gguf_files_name_them_too(tmp_path: Path):
    key, tensors = "tokenizer.ggml.suppress_tokens", qwen3_tensors()
    path = tmp_path / "model.gguf"
    save(path, header(qwen3_keys() | {key: [6, 2, 6]}, tensors), tensors)
    assert read_spec(path).suppressed == (2, 6)
    save(path, header(qwen3_keys() | {key: [8]}, tensors), tensors)
    with pytest.raises(ModelError, match=f"{key} has 8; expected token ids below 8"):
        read_spec(path)
