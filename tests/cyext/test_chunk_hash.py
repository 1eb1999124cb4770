"""Chained hashes: equal for equal prefixes under one key, and for nothing else."""

import array

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from luceasync.cyext.chunk_hash import ROOT, chain, span_key, tenant_key
from tests.reference import chunk_hash as slow

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40)
HASHES = st.binary(min_size=32, max_size=32)
CHUNKS = st.integers(1, 9)
KEY = tenant_key(b"")


def int32(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


@given(TOKENS, HASHES, HASHES, CHUNKS)
def test_a_chain_is_the_slow_truths(tokens, key, parent, chunk_tokens) -> None:
    expected = slow.chain(tokens, key, parent, chunk_tokens)
    assert chain(int32(tokens), key, parent, chunk_tokens) == expected


@given(TOKENS.filter(len), HASHES, HASHES)
def test_a_span_key_is_the_slow_truths(tokens: list[int], key: bytes, parent: bytes) -> None:
    assert span_key(int32(tokens), key, parent) == slow.span_key(tokens, key, parent)


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 127, 128, 1000])
def test_only_full_chunks_have_a_hash(num_tokens: int) -> None:
    tokens = list(range(num_tokens))
    assert chain(int32(tokens), KEY, ROOT, 64) == slow.chain(tokens, KEY, ROOT, 64)
    assert len(chain(int32(tokens), KEY, ROOT, 64)) == num_tokens // 64


def test_a_chunk_beyond_any_prompt_is_never_full() -> None:
    assert chain(int32([1, 2]), KEY, ROOT, 2**80) == []


@given(TOKENS, TOKENS, CHUNKS)
def test_hashes_agree_as_far_as_the_tokens_do(tokens, others, chunk_tokens) -> None:
    one, other = (chain(int32(ids), KEY, ROOT, chunk_tokens) for ids in (tokens, others))
    for chunk, (a, b) in enumerate(zip(one, other, strict=False)):
        end = (chunk + 1) * chunk_tokens
        assert (a == b) == (tokens[:end] == others[:end])


@pytest.mark.slow
@given(TOKENS, CHUNKS, st.integers(0, 9))
def test_a_chain_goes_on_from_any_of_its_hashes(tokens, chunk_tokens, num_chunks) -> None:
    whole = chain(int32(tokens), KEY, ROOT, chunk_tokens)
    head, rest = whole[:num_chunks], tokens[num_chunks * chunk_tokens :]
    parent = head[-1] if head else ROOT
    assert head + chain(int32(rest), KEY, parent, chunk_tokens) == whole


def test_another_key_parent_or_chunk_shares_no_hash() -> None:
    tokens = int32([7] * 24)
    chains = [
        chain(tokens, KEY, ROOT, 4),
        chain(tokens, tenant_key(b"sk-1"), ROOT, 4),
        chain(tokens, KEY, KEY, 4),
        chain(tokens, KEY, ROOT, 8),
        [span_key(tokens[:end], KEY, ROOT) for end in range(1, 25)],
    ]
    hashes = [found for one in chains for found in one]
    assert len(set(hashes)) == len(hashes) == 6 + 6 + 6 + 3 + 24


def test_a_span_never_hashes_as_a_chunk() -> None:
    # The chunk's parent begins like a span's message; only the sizes differ.
    tokens = int32(range(64))
    parent = b"S" + bytes(31)
    assert span_key(tokens, KEY, ROOT) not in chain(tokens, KEY, parent, 64)
    assert span_key(tokens, KEY, ROOT) != chain(tokens, KEY, ROOT, 64)[0]


def test_tenants_have_keys_of_their_own_from_which_no_secret_can_be_read() -> None:
    secrets = [b"", b"a", b"b", b"a" * 32]
    keys = [tenant_key(secret) for secret in secrets]
    assert len({*keys, *secrets, *(blake3(secret).digest() for secret in secrets)}) == 12
    assert {len(key) for key in keys} == {32}
    assert tenant_key(b"a") == keys[1]


def test_keys_are_those_of_files_already_written() -> None:
    assert KEY.hex().startswith("56ce8d590fa5bab9")
    assert chain(int32(range(64)), KEY, ROOT, 64)[0].hex().startswith("cea9a9aeb46e760c")
    assert span_key(int32(range(64)), KEY, ROOT).hex().startswith("5b5082355843b77d")


@pytest.mark.parametrize("tokens", [array.array("i", [1, 2, 3]), memoryview(int32([1, 2, 3]))])
def test_any_int32_buffer_will_do(tokens) -> None:
    assert chain(tokens, KEY, ROOT, 2) == slow.chain([1, 2, 3], KEY, ROOT, 2)


BAD_TOKENS = [
    ([1, 2], "expected a C-contiguous int32 buffer, got list"),
    (np.arange(9, dtype=np.int32)[::2], "got ndarray .*not C-contiguous"),
    (np.arange(4), "expected one dimension of int32, got 1 with items of format 'l'"),
    (np.arange(4, dtype=np.uint32), "format 'I'"),
    (np.arange(4, dtype=np.float32), "format 'f'"),
    (np.arange(4, dtype=">i4"), "format '>i'"),
    (np.zeros((2, 2), np.int32), "got 2 with items of format 'i'"),
    (bytes(8), "format 'B'"),
]


@pytest.mark.parametrize(("tokens", "words"), BAD_TOKENS)
def test_tokens_that_are_not_int32_in_a_row_are_refused(tokens, words: str) -> None:
    with pytest.raises(ValueError, match=f"tokens: .*{words}"):
        chain(tokens, KEY, ROOT, 2)
    with pytest.raises(ValueError, match=f"tokens: .*{words}"):
        span_key(tokens, KEY, ROOT)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_key_or_parent_of_another_size_is_refused(size: int) -> None:
    tokens = int32([1])
    for word, pair in (("key", (bytes(size), ROOT)), ("parent", (KEY, bytes(size)))):
        with pytest.raises(ValueError, match=f"{word}: expected 32 bytes, got {size}"):
            chain(tokens, *pair, 1)
        with pytest.raises(ValueError, match=f"{word}: expected 32 bytes, got {size}"):
            span_key(tokens, *pair)


@pytest.mark.parametrize("chunk_tokens", [0, -1, -(2**70)])
def test_a_chunk_holds_a_token(chunk_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"chunk_tokens {chunk_tokens}: expected 1 or more"):
        chain(int32([1]), KEY, ROOT, chunk_tokens)


def test_a_node_adds_a_token() -> None:
    with pytest.raises(ValueError, match="tokens: expected one or more, got none"):
        span_key(int32([]), KEY, ROOT)


def test_no_buffer_stays_held_open() -> None:
    tokens = array.array("i", [1, 2, 3])
    chain(tokens, KEY, ROOT, 2)
    span_key(tokens, KEY, ROOT)
    tokens.append(4)  # fails while a buffer is still held open
    assert tokens[-1] == 4
