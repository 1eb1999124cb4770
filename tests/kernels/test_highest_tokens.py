"""The highest logits of every row and its mass, as torch computes them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from luceasync.kernels import highest_tokens as kernels
from luceasync.ranking import local
from luceasync.ranking.logits import NO_TOKEN

INF = math.inf


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small programs and groups, so that few logits have several of both."""
    monkeypatch.setattr(kernels, "STRETCH", 128)
    monkeypatch.setattr(kernels, "NUM_RANKERS", 2)
    monkeypatch.setattr(kernels, "MOST_MEMBERS", 4)


def both(
    logits: torch.Tensor,
    num_ranked: int,
    mass_at: Sequence[float] = (),
    carry: torch.Tensor | None = None,
) -> torch.Tensor:
    """Run the kernels and check them against torch, except for the order of equal logits."""
    asked = logits, carry, num_ranked, mass_at, NO_TOKEN
    found, expected = kernels.highest_tokens(*asked), local.highest_tokens(*asked)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    num_carried = 0 if carry is None else carry.shape[1]
    assert torch.equal(found[:, : num_carried + 1], expected[:, : num_carried + 1])
    is_finite = expected[:, num_carried] != NO_TOKEN
    masses = [found[is_finite, num_carried + 1] for found in (found, expected)]
    torch.testing.assert_close(*masses, rtol=1e-6, atol=0.0)
    values, ids = found[:, num_carried + 2 :].chunk(2, 1)
    expected_values, expected_ids = expected[:, num_carried + 2 :].chunk(2, 1)
    # Where torch sorts a negative NaN differs between devices.
    is_plain = ~logits.isnan().any(1)
    torch.testing.assert_close(values[is_plain], expected_values[is_plain], rtol=0, atol=0)
    ids, expected_ids = ids.long(), expected_ids.long()
    here = logits.float().gather(1, ids).double()
    torch.testing.assert_close(here, values, rtol=0, atol=0, equal_nan=True)
    for row, wanted, ranked, plain in zip(ids, expected_ids, values, is_plain, strict=True):
        assert len(row.unique()) == len(row)
        is_known = (ranked != ranked[-1]) | (len(row) == logits.shape[1])
        if plain:
            assert torch.equal(row[is_known].sort().values, wanted[is_known].sort().values)
    return found


@pytest.mark.parametrize("num_vocab", [1, 31, 64, 301, 1000])
@pytest.mark.parametrize("num_ranked", [1, 20, 70, 1024])
@pytest.mark.usefixtures("small")
def test_any_number_is_found_in_order(num_ranked, num_vocab, device) -> None:
    both(torch.randn(2, num_vocab, device=device), num_ranked, (0.7, 0.7))


@pytest.mark.usefixtures("small")
def test_half_precision_has_many_equals(dtype, device) -> None:
    both(torch.randn(3, 700, device=device).to(dtype), 50)


@pytest.mark.usefixtures("small")
def test_rows_may_lie_apart_and_carry_what_comes_with_them(device) -> None:
    logits = torch.randn(5, 3, 130, device=device)[:, 1]
    carry = torch.arange(15, device=device).view(3, 5).T
    assert torch.equal(both(logits, 7, (), carry)[:, :3], carry.double())


@pytest.mark.usefixtures("small")
def test_masses_are_of_the_rows_and_temperatures_that_were_named(device) -> None:
    logits = torch.randn(4, 300, device=device) * 5
    temperatures = (0.0, 0.3, 2.0, 3e38)
    masses = both(logits, 5, temperatures)[:, 1].tolist()
    assert masses[0] == 0.0 and masses[3] == 300.0
    for row in (1, 2):
        below = (logits[row] - logits[row].max()).double() / temperatures[row]
        assert masses[row] == pytest.approx(below.exp().sum().item(), rel=1e-6)


def odd_rows(num_vocab: int, device: torch.device) -> torch.Tensor:
    """Rows with difficult orders."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(14, num_vocab, generator=generator)
    rows[0] = 1.5
    rows[1, 0], rows[2, -1], rows[3, num_vocab // 2] = math.nan, -math.nan, INF
    rows[4] = -INF
    rows[5] = 0.0
    rows[5, ::3] = -0.0
    rows[6] = torch.arange(num_vocab) * 1e-42  # subnormal
    rows[7, 5:] = -INF
    rows[8, 1:] = -INF
    rows[9] = rows[9].sort().values
    rows[10] = rows[10].sort(descending=True).values
    rows[11] = rows[11] * 1e-3 + 50  # close to each other
    rows[12] = (rows[12] * 2).round()
    rows[13, torch.rand(num_vocab, generator=generator) < 0.5] = -INF
    return rows.to(device)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("num_ranked", [3, 60])
def test_odd_rows_are_ranked_as_any(num_ranked, device) -> None:
    rows = odd_rows(333, device)
    best = both(rows, num_ranked, (1.0,) * len(rows))[:, 0].tolist()
    assert best[:5] == [0, NO_TOKEN, NO_TOKEN, NO_TOKEN, NO_TOKEN] and best[5] == 0


@pytest.mark.usefixtures("small")
def test_logits_that_are_high_in_few_groups_are_found_all_the_same(device) -> None:
    _, num_groups = kernels.groups_of(1000, 60)
    logits = torch.randn(2, 1000, device=device)
    logits[:, torch.arange(1000) % num_groups < 50] += 20.0
    both(logits, 60)


@pytest.mark.usefixtures("small")
def test_more_may_be_wanted_than_there_are_groups(device, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "MOST_GROUPS", 32)
    both(torch.randn(2, 1000, device=device), 200, (1.0, 1.0))


@pytest.mark.parametrize("num_vocab", [1, 50, 1000, 50_260, 151_936, 248_320, 3_000_000])
@pytest.mark.parametrize("num_ranked", [1, 84, 1024, 4096, 20_000])
def test_groups_hold_every_token_once_and_are_few(num_ranked, num_vocab) -> None:
    num_members, num_groups = kernels.groups_of(num_vocab, num_ranked)
    assert num_members & (num_members - 1) == 0 and kernels.STRETCH % num_members == 0
    assert num_vocab <= num_members * num_groups < num_vocab + 32 * num_members
    assert num_groups <= kernels.MOST_GROUPS
    if 2 * num_ranked <= min(num_vocab, kernels.MOST_GROUPS):
        assert num_groups >= 2 * num_ranked or num_members == 1


def words_of(found: torch.Tensor) -> torch.Tensor:
    """Bit by bit, except for the ids of equal logits, which come in any order."""
    return found[:, 1 : 2 + (found.shape[1] - 2) // 2]


@pytest.mark.usefixtures("small")
def test_a_row_is_the_same_beside_any_others(device) -> None:
    logits = torch.randn(5, 700, device=device)
    mass_at = 0.7, 0.0, 1.0, 0.3, 0.7
    together = kernels.highest_tokens(logits, None, 40, mass_at, NO_TOKEN)
    for row, at in enumerate(mass_at):
        alone = kernels.highest_tokens(logits[row : row + 1], None, 40, (at,), NO_TOKEN)
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("num_vocab", [1000, 50_260, 151_936, 248_320])
@pytest.mark.parametrize("num_ranked", [1, 84, 1024, 1088, 4096])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 64])
def test_rows_of_every_size(num_rows, num_ranked, num_vocab, device) -> None:
    for spread, middle in ((1.0, 0.0), (3.0, -10.0), (0.01, 20.0)):
        logits = torch.randn(num_rows, num_vocab, device=device) * spread + middle
        both(logits, num_ranked, (0.8,) * num_rows)
        both(logits.bfloat16().float(), num_ranked)


@pytest.mark.gpu
@pytest.mark.parametrize("num_vocab", [1003, 50_260, 151_936, 248_320])
@pytest.mark.parametrize("num_ranked", [84, 1024, 4096])
def test_odd_rows_of_every_size(num_ranked, num_vocab, device) -> None:
    both(odd_rows(num_vocab, device), num_ranked, (1.0,) * 14)


@pytest.mark.gpu
@pytest.mark.parametrize("num_left", [1, 5, 2000, 34_000])
@pytest.mark.parametrize("together", [True, False])
def test_what_a_mask_leaves_is_found(together, num_left, device) -> None:
    num_vocab = 151_936
    logits = torch.full((2, num_vocab), -INF, device=device)
    left = torch.arange(700, 700 + num_left) if together else torch.randperm(num_vocab)[:num_left]
    logits[:, left.to(device)] = torch.randn(2, num_left, device=device)
    both(logits, 1024, (1.0, 0.5))


@pytest.mark.gpu
def test_a_row_of_full_size_is_the_same_beside_any_others(device) -> None:
    logits = torch.randn(64, 151_936, device=device) * 2
    together = kernels.highest_tokens(logits, None, 1024, (0.7,) * 64, NO_TOKEN)
    for row in range(0, 64, 7):
        alone = kernels.highest_tokens(logits[row : row + 1], None, 1024, (0.7,), NO_TOKEN)
        assert torch.equal(words_of(alone), words_of(together[row : row + 1]))
