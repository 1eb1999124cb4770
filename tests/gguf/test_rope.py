"""The ropes that GGUF files describe, in keys or as a tensor."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from luceasync.errors import ModelError
from luceasync.models.files import read_spec
from luceasync.models.rope import PLAIN, DividedRope, LinearRope, Rope, YarnRope, yarn_magnitude
from tests.gguf.files import header, qwen3_keys, qwen3_tensors, save

DIVISORS = tuple(1.0 + i / 4 for i in range(16))


def rope_of(folder: Path, divisors: tuple[float, ...] = (), **keys: object) -> Rope:
    """The rope of a file with these keys below qwen3.rope, and such a tensor."""
    tensors = dict(qwen3_tensors())
    if divisors:
        tensors = {"rope_freqs.weight": ((len(divisors),), 0, 4 * len(divisors))} | tensors
    full = {f"qwen3.rope.{key.replace('__', '.')}": value for key, value in keys.items()}
    begin = header(qwen3_keys() | full, tensors)
    path = save(folder / "model.gguf", begin, tensors)
    with path.open("r+b") as file:
        file.seek(len(begin))
        file.write(struct.pack(f"<{len(divisors)}f", *divisors))
    [rope] = {mixer.rope for mixer in read_spec(path).mixers}
    return rope


def test_a_factor_is_linear_unless_a_type_is_named(tmp_path: Path):
    assert rope_of(tmp_path) == PLAIN
    assert rope_of(tmp_path, scaling__factor=4.0) == LinearRope(4.0)
    assert rope_of(tmp_path, scaling__factor=4.0, scaling__type="linear") == LinearRope(4.0)
    assert rope_of(tmp_path, scaling__factor=1.0, scaling__type="none") == PLAIN


def test_yarn_is_of_the_length_that_the_file_names_or_has(tmp_path: Path):
    yarn = {"scaling__factor": 4.0, "scaling__type": "yarn"}
    expected = YarnRope(4.0, 512, 32.0, 1.0, yarn_magnitude(4.0), True)
    assert rope_of(tmp_path, **yarn) == expected
    own = {"scaling__original_context_length": 128, "scaling__yarn_beta_fast": 16.0}
    expected = YarnRope(4.0, 128, 16.0, 1.0, yarn_magnitude(4.0), True)
    assert rope_of(tmp_path, **yarn, **own) == expected


def test_frequencies_are_divided_by_the_numbers_of_a_tensor(tmp_path: Path):
    rope = rope_of(tmp_path, DIVISORS)
    assert rope == DividedRope(DIVISORS)
    assert (PLAIN.frequencies(1e6, 32) / rope.frequencies(1e6, 32)).tolist() == list(DIVISORS)


@pytest.mark.parametrize("divisors", [DIVISORS[:8], (0.0, *DIVISORS[1:]), (float("inf"),) * 16])
def test_other_numbers_of_that_tensor_are_refused(tmp_path: Path, divisors: tuple[float, ...]):
    with pytest.raises(ModelError, match=r"'rope_freqs\.weight' has"):
        rope_of(tmp_path, divisors)


def test_a_tensor_and_keys_at_once_are_refused(tmp_path: Path):
    with pytest.raises(ModelError, match=r"scaling\.type = 'linear' beside the tensor"):
        rope_of(tmp_path, DIVISORS, scaling__factor=4.0)
