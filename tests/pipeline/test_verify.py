"""Verify passes see what decoding would see and write nothing; a committed path equals decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend

NUM_PROMPT = 70
TOLERANCE = 1e-4
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
VERIFY_ROWS = (6, 7, 9, 23)
CHAIN = (ROOT, 0, 1, 2, 3, 4)


def prompt() -> list[int]:
    return torch.randint(3, 512, (NUM_PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()


def prefill(backend: LayerSplitBackend, lane: int, tokens: list[int]) -> Tensor:
    backend.reset(lane)
    return backend.prefill(lane, 0, tokens, project=True).clone()


def random_tree(num_rows: int, seed: int) -> tuple[int, ...]:
    choose = random.Random(seed)
    return (ROOT, *(choose.randrange(row) for row in range(1, num_rows)))


def verify(
    backend: LayerSplitBackend, lanes: list[int], trees: list[tuple[int, ...]], tokens: list
) -> Tensor:
    parents = torch.tensor(trees, dtype=torch.int32)
    begins = [NUM_PROMPT] * len(lanes)
    return backend.verify(lanes, begins, torch.tensor(tokens), parents).whole().clone()


def path_to(parents: tuple[int, ...], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path[::-1]


def random_tokens(num_rows: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, 512) for _ in range(num_rows)]


def expected_rows(backend, parents: tuple[int, ...], tokens: list[int]) -> Tensor:
    """The reference: each row's path, prefilled from the start on another lane."""
    rows = []
    for row in range(len(parents)):
        path = [tokens[r] for r in path_to(parents, row)]
        rows.append(prefill(backend, 3, prompt() + path))
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("parents", [CHAIN, random_tree(9, 0), random_tree(23, 1)], ids=len)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_row_sees_its_path_and_nothing_else(
    tiny_dir: Path, make_backend, parents: tuple[int, ...], num_shards: int
):
    backend = make_backend(
        tiny_dir, num_shards=num_shards, page_order=SHUFFLED, verify_rows=VERIFY_ROWS
    )
    prefill(backend, 1, prompt())
    tokens = random_tokens(len(parents), 2)
    logits = verify(backend, [1], [parents], [tokens])[0]
    assert (logits - expected_rows(backend, parents, tokens)).abs().max() < TOLERANCE


def test_verification_writes_nothing(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir, verify_rows=VERIFY_ROWS)
    prefill(backend, 0, prompt())
    untouched = backend.decode([0], [NUM_PROMPT], [9]).whole()[0].clone()
    prefill(backend, 0, prompt())
    verify(backend, [0], [CHAIN], [random_tokens(6, 3)])
    assert torch.equal(backend.decode([0], [NUM_PROMPT], [9]).whole()[0], untouched)


def test_without_parents_every_row_follows_the_one_before_it(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir, verify_rows=VERIFY_ROWS)
    prefill(backend, 2, prompt())
    tokens = torch.tensor([random_tokens(6, 1)])
    logits = backend.verify([2], [NUM_PROMPT], tokens).whole().clone()
    assert torch.equal(verify(backend, [2], [CHAIN], tokens.tolist()), logits)


def test_an_empty_path_keeps_nothing(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir, verify_rows=VERIFY_ROWS)
    prefill(backend, 0, prompt())
    untouched = backend.decode([0], [NUM_PROMPT], [9]).whole()[0].clone()
    prefill(backend, 0, prompt())
    verify(backend, [0], [CHAIN], [random_tokens(6, 3)])
    backend.commit([[]])
    assert torch.equal(backend.decode([0], [NUM_PROMPT], [9]).whole()[0], untouched)


@pytest.mark.parametrize("row", [0, 3, 8])
def test_a_committed_path_is_as_if_it_had_been_decoded(tiny_dir: Path, make_backend, row: int):
    backend = make_backend(tiny_dir, page_order=SHUFFLED, verify_rows=VERIFY_ROWS)
    parents, tokens = random_tree(9, 4), random_tokens(9, 5)
    prefill(backend, 0, prompt())
    verify(backend, [0], [parents], [tokens])
    path = path_to(parents, row)
    backend.commit([path])
    for step in range(4):
        end = NUM_PROMPT + len(path) + step
        found = backend.decode([0], [end], [step + 11]).whole()[0].clone()
        spoken = prompt() + [tokens[r] for r in path] + [i + 11 for i in range(step + 1)]
        assert (found - prefill(backend, 2, spoken)).abs().max() < TOLERANCE


def test_lanes_are_verified_together_each_with_its_own_tree(tiny_dir: Path, make_backend):
    backend = make_backend(tiny_dir, verify_rows=VERIFY_ROWS)
    trees = [random_tree(7, 6), random_tree(7, 7)]
    tokens = [random_tokens(7, 8), random_tokens(7, 9)]
    for lane in (0, 2):
        prefill(backend, lane, prompt())
    both = verify(backend, [0, 2], trees, tokens)
    backend.commit([[], path_to(trees[1], 6)])
    for i, lane in enumerate((0, 1)):
        prefill(backend, lane, prompt())
        alone = verify(backend, [lane], [trees[i]], [tokens[i]])[0]
        assert (both[i] - alone).abs().max() < TOLERANCE


@pytest.mark.slow
def test_greedy_speculation_with_any_proposal_gives_the_decoded_tokens(tiny_dir, make_backend):
    """Chains that are right at random: whatever is accepted, the text is the one of plain
    decoding.
    """
    backend = make_backend(tiny_dir, verify_rows=VERIFY_ROWS)
    token, plain = int(prefill(backend, 0, prompt()).argmax()), []
    for step in range(40):
        plain.append(token)
        token = int(backend.decode([0], [NUM_PROMPT + step], [token]).whole()[0].argmax())
    choose, spoken = random.Random(3), [int(prefill(backend, 1, prompt()).argmax())]
    while len(spoken) < 40:
        begin = NUM_PROMPT + len(spoken) - 1
        guess = [*plain[len(spoken) :], *[5] * 6][:5]
        wrong = choose.randrange(6)
        guess = [t if i < wrong else (t + 1) % 512 for i, t in enumerate(guess)]
        logits = backend.verify([1], [begin], torch.tensor([[spoken[-1], *guess]])).whole()[0]
        best = logits.argmax(-1).tolist()
        accepted = next((i for i, t in enumerate(guess) if t != best[i]), len(guess))
        backend.commit([list(range(accepted + 1))])
        spoken += [*guess[:accepted], best[accepted]]
    assert spoken[:40] == plain
