"""A start is refused before torch is imported."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from tests.cli.forked import Commands, Ended, commands
from tests.gguf.files import header, qwen3_keys, qwen3_tensors, save


@pytest.fixture(scope="module")
def luceasync() -> Iterator[Commands]:
    with commands("serve", "/none") as ready:
        yield ready


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "chat", "plan"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/none"], "/none: does not exist"),
        (["--draft", "/none"], "--draft /none: does not exist"),
        (["--target-device", "abacus"], "--target-device abacus: 'abacus' is not a device"),
        (["--draft", "none", "--draft-block", "4"], "--draft-block 4: it needs a drafter"),
        (["--target-devices", "abacus"], "'abacus' is not a device"),
        (["--draft-device", "abacus"], "'abacus' is not a device"),
        (["--target-device", "cpu", "--target-layer-split", "1,2"], "2 weights for 1 devices"),
    ],
)
def test_a_typo_is_one_line_and_no_torch(luceasync, command, arguments, words):
    refused(luceasync.run(command, *arguments), words)


@pytest.mark.slow
def test_a_value_of_a_file_names_the_file(luceasync, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[placement]\ntarget_device = "abacus"\n')
    result = luceasync.run("serve", "--config", str(path))
    refused(result, f"(settings are also read from {path})")


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_model_without_a_tokenizer(luceasync, command, tmp_path):
    (tmp_path / "config.json").write_bytes((BUNDLED_MODEL_DIR / "config.json").read_bytes())
    refused(
        luceasync.run(command, str(tmp_path), "--draft", "none"), "tokenizer.json does not exist"
    )


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_weight_files_that_the_index_lists_but_are_missing(luceasync, command, tmp_path):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((BUNDLED_MODEL_DIR / name).read_bytes())
    (tmp_path / "one.safetensors").touch()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    words = "1 of 2 weight files do not exist, the first is two.safetensors"
    refused(luceasync.run(command, str(tmp_path), "--draft", "none"), words)


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_cache_directory_that_is_a_file(luceasync, command, tmp_path):
    (tmp_path / "file").touch()
    result = luceasync.run(command, "--kv-cache-dir", str(tmp_path / "file"))
    refused(result, f"--kv-cache-dir {tmp_path / 'file'}: ")


def test_a_missing_certificate(luceasync):
    result = luceasync.run("serve", "--tls-cert", "/none.pem", "--tls-key", "/none.pem")
    refused(result, "--tls-cert /none.pem: cannot be read")


def test_a_port_that_is_taken(luceasync):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused(luceasync.run("serve", "--port", str(port)), "cannot listen there")


def refused(result: Ended, words: str) -> None:
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    assert "torch" not in result.loaded
    assert result.stderr.startswith("luceasync: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "chat", "plan"])
def test_gguf_files_that_cannot_be_served(luceasync, command, tmp_path):
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    first.write_bytes(b"PK\3\4")
    refused(luceasync.run(command, str(first)), f"{first}: not a GGUF file")
    refused(
        luceasync.run(command, "--draft", str(first)), "a.gguf: not a GGUF file: it begins with"
    )
    second.touch()
    refused(luceasync.run(command, str(tmp_path)), "there are 2 GGUF files (a.gguf, b.gguf)")


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GEMMA = {"model_type": "gemma3_text", "sliding_window": 16}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias = True is not supported"),
        (
            {"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}},
            "rope_type 'longrope' is not supported",
        ),
        (
            GEMMA | {"use_bidirectional_attention": True},
            "use_bidirectional_attention = True is not",
        ),
        (
            GEMMA | {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping = 50.0 is not supported",
        ),
        (
            {"model_type": "laguna", "moe_apply_router_weight_on_input": True},
            "moe_apply_router_weight_on_input = True is not supported",
        ),
    ],
)
@pytest.mark.parametrize("command", ["serve", "plan"])
@pytest.mark.covered(1)
def test_a_config_that_is_not_computed_is_one_line(luceasync, command, fields, words, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | fields))
    (tmp_path / "tokenizer.json").write_bytes((BUNDLED_MODEL_DIR / "tokenizer.json").read_bytes())
    refused(luceasync.run(command, str(tmp_path), "--draft", "none"), words)


@pytest.mark.slow
def test_a_pre_tokenizer_that_is_not_known_is_one_line(luceasync, tmp_path):
    keys, tensors = qwen3_keys(tokenizer__ggml__pre="klingon"), qwen3_tensors()
    path = save(tmp_path / "model.gguf", header(keys, tensors), tensors)
    result = luceasync.run("serve", str(path), "--draft", "none")
    refused(result, "tokenizer.ggml.pre 'klingon' is not supported; supported: ")
