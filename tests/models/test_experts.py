"""Routed experts: which are chosen, and that each row gets the sum of its own, alone or among
others, in every body and encoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from luceasync.cyext.quantised import KERNELS
from luceasync.models.encodings import DenseEncoding, NumbersInMemory, WeightPlacement
from luceasync.models.layer_reader import whole
from luceasync.models.ops import Ops, TorchOps
from luceasync.models.packed_experts import CompiledExperts
from luceasync.models.packed_ops import PackedOps
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.quant.packed import dequantise
from luceasync.models.quant.random import random_packed
from luceasync.models.torch_experts import sorted_choice
from luceasync.models.weights import Choice, ExpertWeights, Routing

NUM_EXPERTS, NUM_CHOSEN = 6, 3
BODIES: dict[str, Callable[[], Ops]] = {"torch": TorchOps, "compiled": PackedOps}
# Encodings of gates and ups, and of downs; 704 columns are no multiple of 128.
KINDS = {
    "bf16": ("", "", torch.bfloat16, 64, 32),
    "fp32": ("", "", torch.float32, 64, 32),
    "fp32, wide": ("", "", torch.float32, 2048, 32),
    "Q4_K, Q6_K": ("Q4_K", "Q6_K", torch.bfloat16, 256, 256),
    "Q4_K, Q6_K in float32": ("Q4_K", "Q6_K", torch.float32, 256, 256),
    "Q5_K, Q5_0 of 704": ("Q5_K", "Q5_0", torch.bfloat16, 256, 704),
    "Q8_0, Q5_1 of 2880": ("Q8_0", "Q5_1", torch.float32, 96, 2880),
    "not whole tiles": ("Q8_0", "Q8_0", torch.bfloat16, 64, 96),
}


@dataclass
class Model:
    """The matrices of experts on a device, and the same numbers in float32."""

    ops: Ops
    gate_up: ExpertWeights
    down: ExpertWeights
    gates: Tensor  # [experts, inner, dim]
    ups: Tensor
    downs: Tensor  # [experts, dim, inner]
    dtype: torch.dtype

    def __call__(self, x: Tensor, choice: Choice) -> Tensor:
        results = self.down.linear(self.gate_up.swiglu(x, choice), choice)
        return self.ops.add_weighted(results, choice, x)

    def expected(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The same, row by row and expert by expert, in float64."""
        out = x.double()
        for row in range(len(x)):
            for expert, weight in zip(experts[row].tolist(), weights[row].double(), strict=True):
                own = x[row].double()
                gate, up = (w[expert].double() @ own for w in (self.gates, self.ups))
                out[row] += weight * (self.downs[expert].double() @ (F.silu(gate) * up))
        return out


def rows_of(kind: str, shape: tuple[int, int], dtype: torch.dtype, seed: int, place, parts: int):
    """(weights on the device, their numbers) of a stack of this shape."""
    generator = torch.Generator().manual_seed(seed)
    if not kind:
        numbers = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
        stack = DenseEncoding().stack(shape, place)
        stack.fill(0, NumbersInMemory("random", numbers), whole)
        return stack.experts(NUM_EXPERTS, parts), numbers.float()
    packed = random_packed(ENCODINGS[kind], shape, generator)
    numbers = dequantise(packed)
    return place.ops.quantised_experts(packed, NUM_EXPERTS, parts, dtype), numbers


def model_of(body: str, kind: str) -> Model:
    of_gates, of_downs, dtype, dim, inner = KINDS[kind]
    ops = BODIES[body]()
    place = WeightPlacement(ops, torch.device("cpu"), dtype)
    shape = (2 * NUM_EXPERTS * inner, dim)
    gate_up, both = rows_of(of_gates, shape, dtype, 1, place, 2)
    down, downs = rows_of(of_downs, (NUM_EXPERTS * dim, inner), dtype, 2, place, 1)
    gates, ups = both.view(2, NUM_EXPERTS, inner, dim)
    return Model(ops, gate_up, down, gates, ups, downs.view(NUM_EXPERTS, dim, inner), dtype)


@pytest.fixture(scope="module", params=BODIES)
def body(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, body: str) -> Model:
    return model_of(body, request.param)


def choice_of(ops: Ops, experts: Tensor) -> Choice:
    """A choice of these experts, the first of each row with the largest weight."""
    logits = torch.zeros(len(experts), NUM_EXPERTS)
    ranks = torch.arange(experts.shape[1], 0, -1).float()
    logits.scatter_(1, experts, ranks.expand(experts.shape))
    return ops.choose(logits, None, Routing(experts.shape[1]))


def chosen(num_rows: int) -> Tensor:
    """Different experts for each row, all of them among many rows."""
    generator = torch.Generator().manual_seed(num_rows)
    each = [torch.randperm(NUM_EXPERTS, generator=generator) for _ in range(num_rows)]
    return torch.stack(each)[:, :NUM_CHOSEN]


def check(model: Model, experts: Tensor) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(len(experts), model.downs.shape[1], generator=generator).to(model.dtype)
    choice = choice_of(model.ops, experts)
    found, expected = model(x, choice), model.expected(x, experts, choice.weights)
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert float(error) < (1e-5 if model.dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("num_rows", [1, 8, 9, 64])
def test_each_row_gets_the_sum_of_its_own_experts(model: Model, num_rows: int):
    check(model, chosen(num_rows))


def test_all_rows_may_choose_one_expert(model: Model):
    check(model, torch.full((20, 1), 4))


def test_every_row_may_choose_every_expert(model: Model):
    check(model, torch.arange(NUM_EXPERTS).expand(20, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_are_the_same_alone_and_among_others(kind: str):
    model, num_rows = model_of("compiled", kind), 40
    experts = chosen(num_rows)
    experts[::2] = experts[0]  # many rows of few experts
    x = torch.randn(num_rows, model.downs.shape[1]).to(model.dtype)
    together = model(x, choice_of(model.ops, experts))
    for row in (0, 1, 7, num_rows - 1):
        alone = model(x[row : row + 1], choice_of(model.ops, experts[row : row + 1]))
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_every_kernel_gives_the_same_products(kernel: str, num_rows: int):
    place = WeightPlacement(PackedOps(), torch.device("cpu"), torch.float32)
    packed = random_packed(ENCODINGS["Q5_K"], (NUM_EXPERTS * 64, 256), torch.Generator())
    numbers = dequantise(packed).view(NUM_EXPERTS, 64, 256)
    experts, choice = chosen(num_rows), choice_of(place.ops, chosen(num_rows))
    x = torch.randn(len(choice.rows), 256)
    found = CompiledExperts(packed, NUM_EXPERTS, kernel).linear(x, choice)
    for row, place_of in enumerate(choice.places.tolist()):
        for expert, at in zip(experts[row].tolist(), place_of, strict=True):
            torch.testing.assert_close(found[at], numbers[expert] @ x[at], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "routing",
    [
        Routing(2),
        Routing(2, is_normalised=False, scale=2.5),
        Routing(3, "sigmoid", scale=2.5, softcap=5.0),
    ],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_best_are_chosen_and_weighed(body: str, routing: Routing, has_bias: bool):
    """As transformers does it, with `topk`, since no scores are equal."""
    logits, bias = torch.randn(50, 16) * 3, torch.randn(16) if has_bias else None
    choice = BODIES[body]().choose(logits, bias, routing)
    capped = (logits / routing.softcap).tanh() * routing.softcap if routing.softcap else logits
    scores = capped.softmax(-1) if routing.scores == "softmax" else capped.sigmoid()
    experts = (scores if bias is None else scores + bias).topk(routing.num_chosen).indices
    weights = scores.gather(-1, experts)
    if routing.is_normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(choice.weights, weights * routing.scale)
    agreed = sorted_choice(experts, weights, 16)
    for name in ("rows", "places", "bounds"):
        assert getattr(choice, name).tolist() == getattr(agreed, name).tolist()


def test_of_equal_scores_that_of_the_lower_number_is_chosen(body: str):
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    choice = BODIES[body]().choose(logits, None, Routing(3))
    experts = torch.bucketize(choice.places, choice.bounds[1:].contiguous(), right=True)
    assert experts.tolist() == [[1, 3, 0], [0, 1, 2]]


@pytest.mark.parametrize("num_rows", [1, 9, 300])
def test_shapes_of_the_torch_body_depend_on_the_number_of_rows_alone(num_rows: int):
    """So that it can be captured: a fake tensor has no numbers that a shape could come from."""
    with FakeTensorMode():
        ops, dim = TorchOps(), 32
        gate_up = ops.experts(torch.empty(2 * NUM_EXPERTS * 16, dim), NUM_EXPERTS, 2)
        down = ops.experts(torch.empty(NUM_EXPERTS * dim, 16), NUM_EXPERTS, 1)
        x = torch.empty(num_rows, dim)
        choice = ops.choose(torch.empty(num_rows, NUM_EXPERTS), None, Routing(NUM_CHOSEN))
        results = down.linear(gate_up.swiglu(x, choice), choice)
        assert ops.add_weighted(results, choice, x).shape == x.shape
