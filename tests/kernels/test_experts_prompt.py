"""Products of a prompt's rows with experts: those of each place's expert, and the same bits in any
chunk.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import experts_order, experts_prompt, experts_prompt_quant
from luceasync.models.quant.ggml import ENCODINGS
from luceasync.models.quant.packed import dequantise
from luceasync.models.quant.random import random_packed
from luceasync.models.quant.tiles import tile
from tests.kernels.cases import distance, random
from tests.kernels.gluon_emulated import emulate

NUM_EXPERTS, NUM_CHOSEN, DIM = 4, 2, 384  # more steps than stages
DTYPE = torch.bfloat16


@pytest.fixture
def prompt_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A Hopper, or one that is emulated."""
    if device.type == "cpu":
        emulate(monkeypatch, experts_prompt, "_prompt_rows_kernel")
        emulate(monkeypatch, experts_prompt_quant, "_prompt_quant_kernel")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is Hopper's")
    return device


class Layer:
    """Gates and ups, and downs, which are multiplied some experts at a time."""

    def __init__(self, width: int, device: torch.device) -> None:
        place = {"dtype": DTYPE, "device": device}
        self.gate_up = random(2, NUM_EXPERTS, width, DIM, scale=DIM**-0.5, **place)
        self.down = random(1, NUM_EXPERTS, DIM, width, scale=width**-0.5, **place)

    def results(self, x: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """The results of both products for each choice: [rows, chosen, ..]."""
        order = experts_order.order(experts, NUM_EXPERTS, experts_prompt.TILE_ROWS)
        num_places, tiles = len(order.rows), order.tiles
        inner = x.new_full((num_places, self.gate_up.shape[2]), torch.nan)
        out = x.new_full((num_places, DIM), torch.nan)
        for first, end in ((0, 3), (3, NUM_EXPERTS)):
            some = self.gate_up[:, first:end].contiguous()
            experts_prompt.multiply(x, some, tiles, inner, rows=order.rows, first=first)
        for first, end in ((0, 1), (1, NUM_EXPERTS)):
            some = self.down[:, first:end].contiguous()
            experts_prompt.multiply(inner, some, tiles, out, first=first)
        places = order.places.long()
        return inner[places], out[places]


def choices(num_rows: int, spread: str) -> Tensor:
    """The experts of each row."""
    random_logits = torch.randn(num_rows, NUM_EXPERTS, generator=torch.Generator().manual_seed(1))
    if spread == "two take all":
        random_logits[:, 1:3] += 1000
    return random_logits.topk(NUM_CHOSEN).indices.int()


@pytest.mark.parametrize(("width", "spread"), [(192, "all"), (64, "two take all")])
def test_each_choice_is_multiplied_by_its_own_expert(width, spread, prompt_device) -> None:
    layer, num_rows = Layer(width, prompt_device), 150
    x = random(num_rows, DIM, dtype=DTYPE, device=prompt_device)
    experts = choices(num_rows, spread).to(prompt_device)
    inner, out = layer.results(x, experts)
    for expert in range(NUM_EXPERTS):
        row, choice = (experts == expert).nonzero(as_tuple=True)
        if len(row) == 0:
            continue
        gate, up = (x[row].double() @ part[expert].double().t() for part in layer.gate_up)
        assert distance(inner[row, choice], F.silu(gate) * up) < 1e-2
        exact = inner[row, choice].double() @ layer.down[0, expert].double().t()
        assert distance(out[row, choice], exact) < 1e-2


def test_a_rows_bits_are_the_same_in_any_chunk(prompt_device) -> None:
    layer, num_rows = Layer(64, prompt_device), 150
    x = random(num_rows, DIM, dtype=DTYPE, device=prompt_device)
    experts = choices(num_rows, "two take all").to(prompt_device)
    whole = layer.results(x, experts)
    for begin, end in [(0, 70), (70, num_rows)]:
        parts = layer.results(x[begin:end], experts[begin:end].contiguous())
        for part, together in zip(parts, whole, strict=True):
            assert torch.equal(part, together[begin:end])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_codes_are_multiplied_as_the_numbers_that_they_stand_for(name, prompt_device) -> None:
    num_rows, width, dim = 130, 48, 512  # more steps than stages
    experts = choices(num_rows, "two take all").to(prompt_device)
    order = experts_order.order(experts, NUM_EXPERTS, experts_prompt.TILE_ROWS)
    num_places = len(order.rows)
    for num_parts, num_given in ((2, num_rows), (1, num_places)):
        shape = (num_parts * NUM_EXPERTS * width, dim)
        generator = torch.Generator(prompt_device).manual_seed(1)
        packed = random_packed(ENCODINGS[name], shape, generator)
        exact = dequantise(packed).to(DTYPE)
        tiled = tile(packed)
        assert tiled.coding in experts_prompt_quant.DECODED
        x = random(num_given, dim, dtype=DTYPE, device=prompt_device)
        rows = order.rows if num_parts == 2 else None
        found, expected = (x.new_full((num_places, width), torch.nan) for _ in range(2))
        experts_prompt_quant.multiply(x, tiled, NUM_EXPERTS, order.tiles, found, rows=rows)
        matrices = exact.view(num_parts, NUM_EXPERTS, width, dim)
        experts_prompt.multiply(x, matrices, order.tiles, expected, rows=rows)
        assert torch.equal(found, expected)
