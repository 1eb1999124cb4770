"""Rows arranged for products of 9 to 16: where each number is, how it is scaled, and that sums of
groups are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import prepared_rows
from luceasync.kernels.cuda_program import compiled
from luceasync.kernels.prepared_rows import ArrangedRows, arrange, wants_sums
from luceasync.models.quant.tiles import coding_of
from tests.kernels.offline import CARDS
from tests.kernels.places import gpu_of_nvidia, on_both
from tests.kernels.test_quant_gemv import ALL

LIFT = 2.0**96
# Scales of even and odd quarters of 16 columns.
LIFTS = {
    **dict.fromkeys(
        ("Q4_K", "Q4_1", "Q5_K", "Q6_K"), (LIFT, LIFT / 16)
    ),  # odd codes are 16 times too large in place
    **dict.fromkeys(("Q8_0", "FP8", "MXFP4", "NVFP4"), (LIFT, LIFT)),
    "IQ4_NL": (1.0, 1.0),  # codes index a table
}
WITH_SUMS = {"Q4_K", "Q5_K"}


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float = 1e-6


@pytest.fixture
def place(request: pytest.FixtureRequest) -> torch.device:
    """The device that programs run on."""
    if request.param == "gpu":
        return gpu_of_nvidia()
    emulate = request.getfixturevalue("emulate")
    return emulate(
        prepared_rows, _WEIGH="weigh_rows", _ARRANGE_FEW="arrange_few", _ARRANGE="arrange_rows"
    )


def rows(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    return torch.randn(num_rows, num_columns, device=device, dtype=torch.bfloat16)


def normed_rows(x: Tensor, norm: Norm) -> Tensor:
    """Normed rows as they lie arranged for codes that index a table, which scale nothing."""
    if len(x) > 16:
        return torch.cat([normed_rows(part, norm) for part in x.tensor_split(len(x) // 9)])
    columns = arrange(x, [coding_of(ALL["IQ4_NL"])], norm).columns[0, 0]
    order = columns_of(torch.arange(16 * 256).view(16, 256).double(), (1.0, 1.0)).long().flatten()
    units = columns.flatten(1).cpu()
    plain = torch.empty_like(units)
    plain[:, order] = units
    found = plain.unflatten(1, (16, 256)).transpose(0, 1).flatten(1)[: len(x), : x.shape[1]]
    wanted = F.rms_norm(x.float(), x.shape[1:], norm.weight, norm.eps).cpu()
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=1e-6)
    return found.to(x.device)


def padded(x: Tensor) -> Tensor:
    """[multiple of 16, whole units of 256 columns], padded with zeros."""
    return F.pad(x, (0, -x.shape[1] % 256, 0, -len(x) % 16))


def columns_of(x: Tensor, lifts: tuple[float, float]) -> Tensor:
    """[sixteens, units, 4, 2, 2, 32, 8], number by number."""
    if len(x) > 16:
        return torch.cat([columns_of(each, lifts) for each in x.split(16)])
    x = padded(x).cpu()
    places, columns, lifted = [], [], []  # within a unit: [4, 2, 2, 32, 8]; [16, 256]; by what
    for row, block, half, pair, number in product(range(16), *map(range, (4, 2, 4, 8))):
        quarter, lane = 2 * half + number // 4, 4 * (row % 8) + pair
        places.append((((block * 2 + row // 8) * 2 + half) * 32 + lane) * 8 + number)
        columns.append(256 * row + 64 * block + 16 * quarter + 4 * pair + number % 4)
        lifted.append(lifts[quarter % 2])
    units = x.unflatten(1, (-1, 256)).transpose(0, 1).flatten(1)
    found = torch.empty_like(units)
    found[:, places] = units[:, columns] * torch.tensor(lifted, dtype=x.dtype)
    return found.view(1, -1, 4, 2, 2, 32, 8)


def sums_of(arranged: ArrangedRows) -> Tensor:
    """Sums of groups of 32 columns: float64 [rows, groups], from three parts each."""
    num_sixteens, num_units = arranged.group_sums.shape[:2]
    parts = arranged.group_sums.double().view(num_sixteens, num_units, 2, 8, 4, 4, 2)
    assert (parts[..., 3, :] == 0).all()
    return parts.sum(-2).permute(0, 2, 3, 1, 4, 5).reshape(16 * num_sixteens, -1)


@on_both(
    "num_rows, num_columns, normed",
    [
        (n, columns, normed)
        for n in (9, 13, 16, 24, 64)
        for columns in (320, 5120)
        for normed in (0, 1)
    ],
    [(9, 320, False), (13, 1216, True), (16, 512, True), (16, 64, False), (35, 320, True)],
)
def test_a_number_lies_where_its_lane_loads_it(
    num_rows: int, num_columns: int, normed: bool, place
) -> None:
    x = rows(num_rows, num_columns, place)
    norm = Norm(torch.rand(num_columns, device=place) + 0.5) if normed else None
    plain = x if norm is None else normed_rows(x, norm)
    for name, lifts in LIFTS.items():
        coding = coding_of(ALL[name])
        arranged = arrange(x, [coding], norm)
        assert len(arranged) == num_rows
        assert torch.equal(arranged.of(coding).cpu(), columns_of(plain, lifts)), name
        assert wants_sums(coding) == (name in WITH_SUMS) == (arranged.group_sums is not None)
        if name in WITH_SUMS:
            wanted = padded(plain).double().unflatten(1, (-1, 32)).sum(-1) * LIFT
            torch.testing.assert_close(sums_of(arranged), wanted, rtol=1e-6, atol=1e-6 * LIFT)


@on_both("names", [("Q4_K", "Q6_K", "IQ4_NL")], [("Q4_K", "Q6_K", "IQ4_NL")])
def test_matrices_of_several_forms_share_a_launch(names: tuple[str, ...], place) -> None:
    x, codings = rows(11, 576, place), [coding_of(ALL[name]) for name in names]
    together = arrange(x, codings)
    for coding in codings:
        alone = arrange(x, [coding])
        assert torch.equal(together.of(coding), alone.of(coding))
        if wants_sums(coding):
            assert torch.equal(together.group_sums, alone.group_sums)


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("card", [name for name, card in CARDS.items() if card.is_nvidia])
def test_the_program_is_compiled_for_every_card(card: str, normed: bool) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    capability = divmod(int(card[3:]), 10)
    constants = prepared_rows.constants_of(
        5120 if normed else 0,
        prepared_rows.NORM_WARPS,
        overlaps=capability >= (9, 0),
        lifts=(0, 1, 2),
        has_sums=True,
    )
    assert compiled(prepared_rows.SOURCE, constants, capability)
