"""The fused kernels of a drafter equal torch for all lengths, windows and heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from luceasync.kernels import draft_attention
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.ops import Norm
from luceasync.speculation.dflash.context import DraftContext
from luceasync.speculation.dflash.draft_ops import TorchDraftOps
from luceasync.speculation.dflash.draft_spec import DraftLayerSpec, DraftSpec
from luceasync.speculation.dflash.triton_draft_ops import TritonDraftOps
from luceasync.speculation.dflash.weights import DraftLayerWeights
from tests.kernels.cases import TOLERANCE, distance, random

NUM_LANES, MAX_CTX = 3, 300
LAYERS = (DraftLayerSpec(40, True), DraftLayerSpec(None, False), DraftLayerSpec(6, False))
HEADS = {
    "plain": AttentionSpec(4, 2, 64, 64, 10000.0, False),
    "three to one": AttentionSpec(3, 1, 32, 32, 1e6, False),
    "wide, one": AttentionSpec(1, 1, 128, 128, 1e6, False),
}


@pytest.fixture(autouse=True)
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few splits, so that short contexts have several chunks each, and the interpreter little to
    do.
    """
    monkeypatch.setattr(draft_attention, "NUM_SPLITS", 2)


def spec_of(attention: AttentionSpec, layers=LAYERS, ctx_max_tokens=None) -> DraftSpec:
    return DraftSpec(
        hidden_size=8,
        intermediate_size=8,
        norm_eps=1e-6,
        attention=attention,
        layers=layers,
        taps=(0,),
        mask_token=1,
        block=9,
        trained_block=9,
        ctx_max_tokens=ctx_max_tokens,
    )


@dataclass(frozen=True)
class Twins:
    """The operations of a drafter twice, each with its own rings."""

    spec: DraftSpec
    place: dict
    contexts: tuple[DraftContext, DraftContext]
    ops: tuple[TorchDraftOps, TritonDraftOps]

    @classmethod
    def of(cls, spec: DraftSpec, dtype: torch.dtype, device: torch.device) -> Twins:
        place = {"dtype": dtype, "device": device}
        sizes = {"num_lanes": NUM_LANES, "max_ctx_tokens": MAX_CTX}
        first, second = DraftContext(spec, **sizes, **place), DraftContext(spec, **sizes, **place)
        ops = (TorchDraftOps(spec, first), TritonDraftOps(spec, second))
        return cls(spec, place, (first, second), ops)

    def index(self, *columns: list[int]) -> list[Tensor]:
        """Inputs as they arrive: views of one small tensor."""
        return list(torch.tensor(columns, device=self.place["device"]))

    def write(self, lanes: list[int], begins: list[int], counts: list[int], num_rows: int) -> None:
        spec = self.spec
        width = spec.num_layers * 2 * spec.attention.kv_dim
        projected = random(len(lanes), num_rows, width, **self.place)
        small = {"dtype": torch.float32, "device": self.place["device"]}
        norms = 1 + random(spec.num_layers, spec.attention.head_dim, scale=0.1, **small)
        for ops in self.ops:
            ops.write_context(projected, norms, *self.index(lanes, begins, counts))

    def attend(self, lanes: list[int], begins: list[int], num_rows: int) -> list[list[Tensor]]:
        """The results of both for every layer."""
        spec, heads = self.spec, self.spec.attention
        num_heads = heads.num_heads + 2 * heads.num_kv_heads
        projected = random(len(lanes), num_rows, num_heads * heads.head_dim, **self.place)
        weights = layer_weights(heads, self.place["device"])
        outputs = []
        for ops in self.ops:
            block = ops.block(*self.index(lanes, begins), num_rows, ops.reach_for(max(begins)))
            layers = range(spec.num_layers)
            outputs.append([ops.attend(layer, projected, weights, block) for layer in layers])
        return outputs

    def agree(self, lanes: list[int], begins: list[int], num_rows: int) -> bool:
        pairs = zip(*self.attend(lanes, begins, num_rows), strict=True)
        return all(distance(b, a) < TOLERANCE[self.place["dtype"]] for a, b in pairs)


def layer_weights(heads: AttentionSpec, device: torch.device) -> DraftLayerWeights:
    """Norms alone."""
    small = {"dtype": torch.float32, "device": device}
    query, key = (1 + random(heads.head_dim, scale=0.1, **small) for _ in range(2))
    rows = [query.expand(heads.num_heads, -1), key.expand(heads.num_kv_heads, -1)]
    nothing = torch.empty(0)
    norm = Norm(None, nothing, 1e-6)
    return DraftLayerWeights(norm, None, torch.cat(rows), None, None)


@pytest.mark.parametrize("name", HEADS)
def test_lanes_of_any_length_are_attended_as_torch_does(name, dtype, device) -> None:
    if name != "plain" and dtype == torch.float16:
        pytest.skip("in the interpreter one shape shows what half does")
    layers = LAYERS if name == "plain" and dtype == torch.float32 else LAYERS[:1]
    twins = Twins.of(spec_of(HEADS[name], layers), dtype, device)
    twins.write([2, 0], [0, 0], [70, 64], 70)
    twins.write([2, 1, 0], [70, 0, 64], [5, 0, 9], 9)
    assert twins.agree([0, 2, 1], [73, 75, 0], 9)


def test_a_block_may_be_shorter_than_the_longest(dtype, device) -> None:
    twins = Twins.of(spec_of(HEADS["plain"]), dtype, device)
    twins.write([2], [0], [70], 70)
    assert twins.agree([2], [70], 3)


@pytest.mark.parametrize("num_rows", [1, 70, 300])
def test_the_same_context_is_written(num_rows, dtype, device) -> None:
    if num_rows > 70 and dtype == torch.float16:
        pytest.skip("in the interpreter fewer rows show what half does")
    twins = Twins.of(spec_of(HEADS["plain"]), dtype, device)
    twins.write([1], [50], [num_rows], num_rows)
    twins.write([0, -1, 1], [0, 3, 50 + num_rows], [4, 5, 0], 5)
    for truth, found in zip(*(context.rings for context in twins.contexts), strict=True):
        for expected, places in zip(truth.places, found.places, strict=True):
            assert distance(places[:, :-1], expected[:, :-1]) < TOLERANCE[dtype]
            assert torch.equal(places[:, :-1] == 0, expected[:, :-1] == 0)


def test_context_below_a_limit_is_not_seen(device) -> None:
    spec = spec_of(HEADS["plain"], LAYERS[1:2], ctx_max_tokens=70)
    twins = Twins.of(spec, torch.float32, device)
    twins.write([0, 1, 2], [0, 0, 0], [150, 150, 150], 150)
    for context in twins.contexts:
        context.valid_from[0] = 131
    assert twins.agree([0, 1], [150, 150], 9)
    assert twins.agree([0, 2], [131, 20], 9)


def test_what_lies_in_places_that_are_not_seen_changes_nothing(device) -> None:
    twins = Twins.of(spec_of(HEADS["plain"]), torch.float32, device)
    twins.write([1], [0], [100], 100)
    for ring in twins.contexts[1].rings:
        for places in ring.places:
            places[:, 0] = torch.nan
            places[:, 1, 100:] = torch.nan
    twins.contexts[0].valid_from[1] = twins.contexts[1].valid_from[1] = 64
    assert twins.agree([1], [100], 9)


def test_padding_gives_zeros(device) -> None:
    twins = Twins.of(spec_of(HEADS["plain"]), torch.float32, device)
    twins.write([0], [0], [20], 20)
    _, outputs = twins.attend([-1, 0], [0, 20], 5)
    assert all((out[0] == 0).all() and (out[1] != 0).all() for out in outputs)


def test_one_pass_serves_every_length(device) -> None:
    assert Twins.of(spec_of(HEADS["plain"]), torch.float32, device).ops[1].reach_for(9000) is None


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 2048])
@pytest.mark.parametrize("num_heads", [32, 72])
def test_a_long_context_is_attended_as_torch_does(window, num_heads, device, monkeypatch) -> None:
    monkeypatch.setattr(draft_attention, "NUM_SPLITS", 32)
    monkeypatch.setitem(globals(), "MAX_CTX", 33000)
    heads = AttentionSpec(num_heads, 8, 128, 128, 1e6, False)
    spec = replace(spec_of(heads, (DraftLayerSpec(window, False),)), block=16)
    twins = Twins.of(spec, torch.bfloat16, device)
    for begin in range(0, 32000, 4000):
        twins.write([1, 0], [begin, begin], [4000, 4000], 4000)
    assert twins.agree([1, 0], [32000, 700], 16)
    assert twins.agree([1], [32000], 16)


@pytest.mark.gpu
def test_a_captured_pass_follows_its_tensors(device) -> None:
    twins = Twins.of(spec_of(HEADS["plain"]), torch.bfloat16, device)
    ops, heads = twins.ops[1], twins.spec.attention
    twins.write([0, 1], [0, 0], [200, 150], 200)
    projected = random(1, 9, (heads.num_heads + 2 * heads.num_kv_heads) * 64, **twins.place)
    weights, index = layer_weights(heads, device), torch.stack(twins.index([0], [200]))

    def run() -> Tensor:
        return ops.attend(1, projected, weights, ops.block(*index, 9, None))

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    index.copy_(torch.tensor([[1], [150]]))
    graph.replay()
    assert torch.equal(out, run())
