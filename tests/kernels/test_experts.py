"""Routed experts on GPUs: rows are routed as the torch body routes them, products are those of each
row's own experts, and the bits of a row do not depend on the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import experts_order, experts_rows
from luceasync.kernels.experts_routing import MAX_ROWS, NO_MATRIX, TILE_ROWS
from luceasync.kernels.experts_slots import SlotTable
from luceasync.models import torch_experts, triton_experts
from luceasync.models.ops import Norm, RoutedExperts, TorchOps
from luceasync.models.quant.packed import dequantise
from luceasync.models.quant.random import random_packed
from luceasync.models.quant.tiles import tile
from luceasync.models.triton_experts import TiledQuantExperts, TritonRoutedExperts
from luceasync.models.triton_ops import TritonOps
from luceasync.models.weights import Router, Routing
from tests.kernels.cases import TOLERANCE, distance, random
from tests.kernels.test_quant_gemv import ALL

NUM_EXPERTS, NUM_CHOSEN, DIM, INNER = 11, 3, 70, 40
NUM_ROWS = [1, 8, 9, 64]
ROUTINGS = [
    Routing(NUM_CHOSEN),
    Routing(NUM_CHOSEN, is_normalised=False, scale=2.5),
    Routing(1, "sigmoid", scale=2.5, softcap=3.0),
]


def routed(
    logits: Tensor,
    bias: Tensor | None,
    routing: Routing,
    has_shared: bool = False,
    table: SlotTable | None = None,
):
    arrivals = torch.zeros(1, dtype=torch.int32, device=logits.device)
    return triton_experts._tiled_choice(
        logits, bias, routing, arrivals, has_shared=has_shared, table=table
    )


def chosen(num_rows: int, device: torch.device) -> Tensor:
    """Logits that differ from row to row."""
    generator = torch.Generator().manual_seed(num_rows)
    return (3 * torch.randn(num_rows, NUM_EXPERTS, generator=generator)).to(device)


@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_rows_are_routed_as_the_torch_body_routes_them(routing, has_bias, num_rows, device) -> None:
    logits = chosen(num_rows, device)
    bias = torch.linspace(1, -1, NUM_EXPERTS, device=device) if has_bias else None
    found = routed(logits, bias, routing)
    truth = torch_experts.choose(logits, bias, routing)
    torch.testing.assert_close(found.weights, truth.weights)
    for name in ("rows", "places", "bounds"):
        assert getattr(found, name).tolist() == getattr(truth, name).tolist()


def test_of_equal_scores_the_lower_number_comes_first_and_none_comes_twice(device) -> None:
    logits = torch.tensor(
        [[1.0, 2.0, 1.0, 2.0, 1.0], [0.0] * 5, [float("nan")] * 5, [1e9, 0, -1e9, 0, 0]],
        device=device,
    )
    found = routed(logits, None, Routing(3))
    experts = torch.bucketize(found.places, found.bounds[1:].contiguous(), right=True)
    assert experts.tolist() == [[1, 3, 0], [0, 1, 2], [0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("logits", ["all one", "random"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_tiles_hold_every_place_once_in_order(num_rows, logits, has_shared, device) -> None:
    same = torch.zeros(num_rows, NUM_EXPERTS, device=device)
    found = routed(
        same if logits == "all one" else chosen(num_rows, device),
        None,
        Routing(NUM_CHOSEN),
        has_shared,
    )
    bounds = found.bounds.tolist()
    expected = []
    for expert in range(NUM_EXPERTS):
        for begin in range(bounds[expert], bounds[expert + 1], TILE_ROWS):
            expected.append([expert, begin, min(begin + TILE_ROWS, bounds[expert + 1])])
    if has_shared:
        num_places = num_rows * NUM_CHOSEN
        assert found.rows[num_places:].tolist() == list(range(num_rows))
        for begin in range(0, num_rows, TILE_ROWS):
            end = min(begin + TILE_ROWS, num_rows)
            expected.append([NUM_EXPERTS, num_places + begin, num_places + end])
    assert found.tiles[: len(expected)].tolist() == expected
    assert (found.tiles[len(expected) :, 0] == NO_MATRIX).all()


@pytest.mark.parametrize("tile_rows", [8, 64])
@pytest.mark.parametrize("logits", ["all one", "random"])
@pytest.mark.parametrize("num_rows", [1, 65, 200])
def test_many_rows_choices_are_sorted_by_expert_and_row_and_divided(
    num_rows, logits, tile_rows, device
) -> None:
    numbers = chosen(num_rows, device)
    if logits == "all one":
        numbers[:, :NUM_CHOSEN] += 1000
    experts = numbers.topk(NUM_CHOSEN).indices.int()
    found = experts_order.order(experts, NUM_EXPERTS, tile_rows)
    truth = torch_experts.sorted_choice(experts.long(), torch.ones(0), NUM_EXPERTS)
    for name in ("rows", "places", "bounds"):
        assert getattr(found, name).tolist() == getattr(truth, name).tolist()
    bounds, expected, tile_bounds = truth.bounds.tolist(), [], [0]
    for expert in range(NUM_EXPERTS):
        begin, end = bounds[expert : expert + 2]
        expected += [[expert, at, min(at + tile_rows, end)] for at in range(begin, end, tile_rows)]
        tile_bounds.append(len(expected))
    for tiles in (
        found.tiles,
        experts_order.tiles_of(found.bounds, len(found.rows), tile_rows),
    ):
        assert tiles.listed[: len(expected)].tolist() == expected
        assert (tiles.listed[len(expected) :, 0] == NO_MATRIX).all()
        assert tiles.bounds.tolist() == tile_bounds


@pytest.mark.parametrize("has_gate", [False, True])
def test_products_of_three_parts_are_those_of_float32(has_gate, device) -> None:
    place = {"dtype": torch.float32, "device": device}
    router, gate = random(NUM_EXPERTS, DIM, **place), random(1, DIM, **place)
    x = random(70, DIM, **place).bfloat16()
    parts = experts_rows.parts_of(router, gate if has_gate else None)
    assert parts.shape[1] % experts_rows.ALIGNED_ROWS == 0
    products = x.float() @ parts.float().flatten(0, 1).t()
    logits, gates = experts_rows.sums_of_parts(products, NUM_EXPERTS, has_gate=has_gate)
    torch.testing.assert_close(logits, x.float() @ router.t(), atol=1e-4, rtol=1e-4)
    if has_gate:
        torch.testing.assert_close(gates, (x.float() @ gate[0]).sigmoid(), atol=1e-4, rtol=1e-4)
    else:
        assert gates is None


@dataclass
class Layer:
    """Routed experts with kernels and as the torch body has them, of the same numbers."""

    kernels: TritonRoutedExperts
    truth: RoutedExperts


def layer(dtype: torch.dtype, device: torch.device, shared_size: int, dim: int = DIM) -> Layer:
    place = {"dtype": dtype, "device": device}
    gate_up = random(2 * NUM_EXPERTS * INNER, dim, scale=dim**-0.5, **place)
    down = random(NUM_EXPERTS * dim, INNER, scale=INNER**-0.5, **place)
    exact = {"dtype": torch.float32, "device": device}
    router, gate = (random(n, dim, scale=dim**-0.5, **exact) for n in (NUM_EXPERTS, 1))
    weight = 1 + random(dim, scale=0.1, **exact)
    both = random(2 * shared_size, dim, scale=dim**-0.5, **place) if shared_size else None
    back = random(dim, shared_size, scale=0.1, **place) if shared_size else None
    made = []
    for ops in (TritonOps(), TorchOps()):
        made.append(
            ops.routed(
                Router(
                    Routing(NUM_CHOSEN),
                    Norm(ops, weight, 1e-6),
                    ops.float_matrix(router),
                    None,
                    None if both is None else ops.float_matrix(gate),
                ),
                ops.experts(gate_up, NUM_EXPERTS, 2),
                ops.experts(down, NUM_EXPERTS, 1),
                None if both is None else ops.gated(ops.pack(both), ops.pack(back)),
            )
        )
    return Layer(*made)


@pytest.mark.covered(2)
@pytest.mark.parametrize("shared_size", [0, INNER, 24], ids=["none", "alike", "other size"])
@pytest.mark.parametrize("num_rows", [*NUM_ROWS, MAX_ROWS + 9])
def test_a_layer_adds_what_the_torch_body_adds(num_rows, shared_size, dtype, device) -> None:
    both = layer(dtype, device, shared_size)
    x = random(num_rows, DIM, dtype=dtype, device=device)
    assert distance(both.kernels.add_to(x.clone()), both.truth.add_to(x.clone())) < TOLERANCE[dtype]


def test_a_rows_bits_are_the_same_alone_and_among_others(dtype, device, rows_by_themselves) -> None:
    kernels = layer(dtype, device, INNER).kernels
    x = random(MAX_ROWS, DIM, dtype=dtype, device=device)
    x[::2] = x[:1] + 0.01 * x[::2]  # many rows of few experts
    together = kernels.add_to(x)
    for begin, end in [(0, 1), (1, 2), (3, 11), (MAX_ROWS - 9, MAX_ROWS)]:
        assert torch.equal(kernels.add_to(x[begin:end].contiguous()), together[begin:end])


def test_sums_of_several_parts_are_the_same_bits_alone_and_among_others(
    dtype, device, rows_by_themselves
) -> None:
    place = {"dtype": dtype, "device": device}
    weights = random(2 * NUM_EXPERTS * INNER, 1100, scale=1100**-0.5, **place)
    gate_up = TritonOps().experts(weights, NUM_EXPERTS, 2)
    x, logits = random(11, 1100, **place), chosen(11, device)

    def results(begin: int, end: int) -> Tensor:
        choice = routed(logits[begin:end], None, Routing(NUM_CHOSEN))
        return gate_up.swiglu(x[begin:end], choice)[choice.places.long()]

    together = results(0, 11)
    for begin, end in [(0, 1), (1, 2), (3, 11), (2, 11)]:
        assert torch.equal(results(begin, end), together[begin:end])


def experts_of(name: str, device: torch.device, num_experts: int = 4):
    """(gates and ups, downs, and their numbers) of random quantised experts."""
    found = []
    for parts, height in ((2, 128), (1, 32)):
        shape = (parts * num_experts * height, 128)
        packed = random_packed(ALL[name], shape, torch.Generator(device).manual_seed(parts))
        numbers = dequantise(packed).view(parts, num_experts, height, 128)
        num_bytes = packed.num_bytes
        found.append((TiledQuantExperts(tile(packed), num_bytes, num_experts, parts), numbers))
    return found


def quantised_rows(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows, and logits for them."""
    x = torch.randn(num_rows, 128, device=device)
    logits = chosen(num_rows, device)[:, :4]
    return (x.bfloat16() if device.type == "cuda" else x), logits


def check(name: str, num_rows: int, device: torch.device, few: bool = True) -> None:
    (gate_up, pairs), (down, downs) = experts_of(name, device)
    x, logits = quantised_rows(num_rows, device)
    choose = routed if few else triton_experts.choose
    choice = choose(logits, None, Routing(2))
    inner = gate_up.swiglu(x, choice)
    results = down.linear(inner, choice)
    bounds = choice.bounds.tolist()
    tolerance = 1e-2 if device.type == "cuda" else 1e-4
    for expert in range(4):
        begin, end = bounds[expert], bounds[expert + 1]
        own = x[choice.rows[begin:end].long()].double()
        gate, up = (own @ part[expert].double().t() for part in pairs)
        assert end == begin or distance(inner[begin:end], F.silu(gate) * up) < tolerance
        exact = inner[begin:end].double() @ downs[0, expert].double().t()
        assert end == begin or distance(results[begin:end], exact) < tolerance


@pytest.mark.covered(1)
@pytest.mark.parametrize("name", ALL)
def test_quantised_products_are_those_of_float64(name: str, device) -> None:
    check(name, 9, device)


@pytest.mark.parametrize("num_rows", [1, 9])
def test_a_quantised_shared_expert_is_one_of_them(num_rows: int, device) -> None:
    (gate_up, _), (down, _) = experts_of("Q4_K", device)
    x, logits = quantised_rows(num_rows, device)
    own = [weights.tiled for weights, _ in experts_of("Q4_K", device, 1)]
    choice = routed(logits, None, Routing(2), has_shared=True)
    inner = gate_up.swiglu(x, choice, own[0])
    results = down.linear(inner, choice, own[1])
    plain = routed(logits, None, Routing(2))
    num_places = plain.places.numel()
    expected = gate_up.swiglu(x, plain)
    assert torch.equal(inner[:num_places], expected)
    assert torch.equal(results[:num_places], down.linear(expected, plain))
    alone = [TiledQuantExperts(m, 0, 1, 2 - i) for i, m in enumerate(own)]
    every = routed(logits[:, :1], None, Routing(1))
    shared = alone[0].swiglu(x, every)
    assert torch.equal(inner[num_places:], shared)
    assert torch.equal(results[num_places:], alone[1].linear(shared, every))


@pytest.mark.parametrize("name", ["Q4_K", pytest.param("Q6_K", marks=pytest.mark.thorough)])
def test_some_more_rows_are_multiplied_in_tiles_of_few(name, device, monkeypatch) -> None:
    most = dict.fromkeys(triton_experts.MOST_OF_CODES, 70)
    monkeypatch.setattr(triton_experts, "MOST_OF_CODES", most)
    check(name, 70, device, few=False)


def test_many_rows_are_multiplied_with_a_few_experts_at_a_time(device, monkeypatch) -> None:
    monkeypatch.setattr(triton_experts, "SLICE_BYTES", 3 * 2 * 128 * 128 * 4)
    check("Q5_K", 70, device, few=False)


@pytest.mark.parametrize("name", ["Q4_K", pytest.param("Q6_K", marks=pytest.mark.thorough)])
def test_a_rows_bits_do_not_depend_on_others_in_quantised_products(
    name, device, rows_by_themselves
) -> None:
    (gate_up, _), (down, _) = experts_of(name, device)
    x, logits = quantised_rows(20, device)

    def results(begin: int, end: int) -> Tensor:
        choice = routed(logits[begin:end], None, Routing(2))
        found = down.linear(gate_up.swiglu(x[begin:end], choice), choice)
        return found[choice.places.long()]

    together = results(0, 20)
    for begin, end in [(0, 1), (2, 11), (19, 20)]:
        assert torch.equal(results(begin, end), together[begin:end])
