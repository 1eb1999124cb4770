"""State is shared by models with the same numbers, and by no others."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.disk_cache.codec import NAMESPACE
from luceasync.errors import ModelError
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.prefix_cache import namespace as namespaces
from luceasync.prefix_cache.namespace import MEMO, namespace_of

WEIGHTS = "model.safetensors"
FP32 = Precision.of("fp32")
FP32 = Precision.of("fp32")


@pytest.fixture
def model_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dir, tmp_path / "model"))


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def name_of(model_dir: Path, cache_dir: Path | None = None, dtype: str = "fp32") -> str:
    return namespace_of(
        ModelFiles(model_dir).weights.paths, read_spec(model_dir), Precision.of(dtype), cache_dir
    )


def flip_last_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.any_family
def test_the_same_files_elsewhere_are_the_same_model(
    model_dir: Path, cache_dir: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model_dir, tmp_path / "copy"))
    names = {name_of(model_dir, cache_dir), name_of(copy, cache_dir), name_of(model_dir)}
    assert len(names) == 1
    assert NAMESPACE.fullmatch(names.pop())


def test_one_bit_of_the_weights_makes_another_model(model_dir: Path, cache_dir: Path) -> None:
    before = name_of(model_dir, cache_dir)
    flip_last_bit(model_dir / WEIGHTS)
    assert name_of(model_dir, cache_dir) != before
    flip_last_bit(model_dir / WEIGHTS)
    assert name_of(model_dir, cache_dir) == before


def test_another_dtype_is_another_namespace(model_dir: Path) -> None:
    assert name_of(model_dir, dtype="fp32") != name_of(model_dir, dtype="bf16")


def test_what_changes_the_numbers_changes_the_namespace(model_dir: Path) -> None:
    spec = read_spec(model_dir)
    turned = replace(spec.mixers[-1], rope_theta=20000.0)  # the last layer's, and all like it
    layers = tuple(
        replace(layer, mixer=turned) if layer.mixer == spec.mixers[-1] else layer
        for layer in spec.layers
    )
    names = {
        namespace_of(ModelFiles(model_dir).weights.paths, changed, FP32, None)
        for changed in (spec, replace(spec, norm_eps=1e-5), replace(spec, layers=layers))
    }
    assert len(names) == 3


def test_what_changes_no_number_does_not(model_dir: Path) -> None:
    spec = replace(read_spec(model_dir), max_positions=64, eos_ids=frozenset({1, 7}))
    (model_dir / "tokenizer.json").unlink()
    assert namespace_of(ModelFiles(model_dir).weights.paths, spec, FP32, None) == name_of(model_dir)


@pytest.mark.parametrize("constant", ["SCHEMA", "CHUNK_TOKENS", "EXACTNESS"])
def test_each_agreement_counts(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, constant: str
) -> None:
    before = name_of(model_dir)
    monkeypatch.setattr(namespaces, constant, 128)
    assert name_of(model_dir) != before


def remember(cache_dir: Path, digest: str) -> None:
    """Give each remembered file another digest."""
    entries = json.loads((cache_dir / MEMO).read_text())
    changed = {path: [*entry[:-1], digest] for path, entry in entries.items()}
    (cache_dir / MEMO).write_text(json.dumps(changed))


def test_files_are_not_read_again_until_they_are_touched(model_dir: Path, cache_dir: Path) -> None:
    truth = name_of(model_dir, cache_dir)
    remember(cache_dir, "0" * 64)
    assert name_of(model_dir, cache_dir) != truth  # it was believed
    os.utime(model_dir / WEIGHTS, (1000, 1000))
    assert name_of(model_dir, cache_dir) == truth


@pytest.mark.parametrize("kind", ["pipe", "endless", "loop", "directory", "large"])
def test_a_memo_that_is_no_small_file_is_ignored_at_once(
    model_dir: Path, cache_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespaces, "MAX_MEMO_BYTES", 1000)
    cache_dir.mkdir()
    memo = cache_dir / MEMO
    match kind:
        case "pipe":
            os.mkfifo(memo)
        case "endless":
            memo.symlink_to("/dev/zero")
        case "loop":
            memo.symlink_to(MEMO)
        case "directory":
            memo.mkdir()
        case "large":
            memo.write_text(json.dumps({"x" * 1000: []}))
    truth = name_of(model_dir)
    assert name_of(model_dir, cache_dir) == truth
    assert name_of(model_dir, cache_dir) == truth


def test_a_change_that_hides_its_time_is_noticed(model_dir: Path, cache_dir: Path) -> None:
    before, status = name_of(model_dir, cache_dir), (model_dir / WEIGHTS).stat()
    flip_last_bit(model_dir / WEIGHTS)
    os.utime(model_dir / WEIGHTS, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert name_of(model_dir, cache_dir) != before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 1}', "[" * 100_000, "\udcff"])
def test_a_damaged_memo_is_ignored_and_replaced(
    model_dir: Path, cache_dir: Path, text: str
) -> None:
    truth = name_of(model_dir)
    cache_dir.mkdir()
    (cache_dir / MEMO).write_text(text, errors="surrogateescape")
    assert name_of(model_dir, cache_dir) == truth
    assert str(model_dir / WEIGHTS) in json.loads((cache_dir / MEMO).read_text())


@pytest.mark.parametrize("entry", [[1, 2], [1, 2, 3, "4", "0" * 64], [1, 2, 3, 4, 5], "no"])
def test_an_entry_that_makes_no_sense_is_ignored(
    model_dir: Path, cache_dir: Path, entry: object
) -> None:
    truth = name_of(model_dir, cache_dir)
    (cache_dir / MEMO).write_text(json.dumps({str(model_dir / WEIGHTS): entry}))
    assert name_of(model_dir, cache_dir) == truth


def test_only_the_owner_may_read_the_memo(model_dir: Path, cache_dir: Path) -> None:
    name_of(model_dir, cache_dir)
    assert [entry.name for entry in cache_dir.iterdir()] == [MEMO]
    assert stat.S_IMODE((cache_dir / MEMO).stat().st_mode) == 0o600
    assert stat.S_IMODE(cache_dir.stat().st_mode) == 0o700


def test_models_hashed_at_once_get_their_own_names(model_dir: Path, cache_dir: Path) -> None:
    copies = [Path(shutil.copytree(model_dir, cache_dir.with_name(f"m{i}"))) for i in range(4)]
    for copy in copies[1::2]:
        flip_last_bit(copy / WEIGHTS)
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda i: name_of(copies[i % 4], cache_dir), range(16)))
    assert names == [name_of(copies[i % 2]) for i in range(16)]
    json.loads((cache_dir / MEMO).read_text())


def test_a_memo_that_cannot_be_written_is_logged(
    model_dir: Path, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache_dir.touch()
    with caplog.at_level(logging.WARNING):
        assert name_of(model_dir, cache_dir) == name_of(model_dir)
    assert MEMO in caplog.text


def test_weights_that_change_while_they_are_read_are_refused(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter(range(100))
    monkeypatch.setattr(namespaces, "_identity", lambda path: [next(sizes)])
    with pytest.raises(ModelError, match="changed while it was read"):
        name_of(model_dir)


# --- directories that are there already ---------------------------------------------------------

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
EXISTING = {
    ("llama", "bf16"): "56e5dfaf7d2e51c906b3b3af99215eb8",
    ("llama", "fp32"): "160421cfede6ab58370004b127bb528a",
    ("ministral", "bf16"): "a1cb3337e4901dfaa6036f78473db8f9",
    ("mistral", "bf16"): "97a867ce56b06cbb6426af40d2cd497e",
    ("qwen2", "bf16"): "0568eaa9fae5f09fe3dee568a2131ff8",
    ("smollm3", "bf16"): "524dd472aca3390f8cd64831eb07c787",
    ("qwen3", "bf16"): "f4ea67d208814072ca6fae87381d1b80",
    ("qwen3", "fp32"): "83ded957d99ab44bde8432eb6a996845",
    ("qwen3_5_text", "bf16"): "bc62f24a57b5c1b3ba837646364b3f59",
    ("qwen3_5_text", "fp32"): "080048f83dad3506010a60978266add3",
}


@pytest.mark.parametrize(("model_type", "dtype"), EXISTING)
def test_namespaces_of_existing_caches_are_unchanged(tmp_path: Path, model_type: str, dtype: str):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": model_type}))
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    assert name_of(tmp_path, dtype=dtype) == EXISTING[model_type, dtype]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bf16", "817a44e608360b05b404c249926845a1"), ("fp32", "45aee61d344ad5205a4db832d2f958e8")],
)
def test_the_namespace_of_the_bundled_model_is_unchanged(dtype: str, expected: str):
    assert name_of(BUNDLED_MODEL_DIR, dtype=dtype) == expected


def test_keys_and_values_of_other_numbers_are_another_namespace(model_dir: Path) -> None:
    spec, mixed = read_spec(model_dir), Precision("fp32", "bf16", "fp32")
    assert namespace_of(ModelFiles(model_dir).weights.paths, spec, mixed, None) != name_of(
        model_dir
    )
