"""On a GPU: asynchronous copies give the same bits as synchronous ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from luceasync.host_cache.arena import PIECE_BYTES, Arena
from luceasync.host_cache.nodes import Span
from luceasync.models.files import ModelFiles, parse_spec, read_spec
from luceasync.models.formats.safetensors import open_checkpoint
from luceasync.models.loader import RandomSource
from luceasync.models.precision import Precision
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.devices import find_devices, host_memory
from luceasync.pipeline.plan import make_plan
from luceasync.pipeline.stage import LocalStage

pytestmark = pytest.mark.gpu
NUM_TOKENS = 8192
WIDE = {
    "model_type": "qwen3_5_text",
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 16384,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "rope_type": "default"},
}  # nodes of hundreds of megabytes from a model that costs nothing


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    arena = host_memory(["cuda:0"], 160 * PIECE_BYTES)
    assert isinstance(arena, Arena) and arena.wait(60)
    yield arena
    torch.cuda.synchronize()
    arena.close()


@pytest.fixture(scope="module")
def backend(arena: Arena) -> Iterator[LayerSplitBackend]:
    """A hybrid model with lane 0 filled."""
    spec = parse_spec(WIDE)
    plan = make_plan(
        spec,
        find_devices(["cuda:0"]),
        precision=Precision.of("bf16"),
        weights=None,
        parallel=3,
        max_ctx_tokens=NUM_TOKENS + 512,
        prefill_chunk_tokens=2048,
    )
    source = RandomSource(torch.bfloat16, torch.device("cuda:0"))
    backend = LayerSplitBackend.load(spec, plan, source, memory=arena)
    yield backend
    backend.close()


def prefill(backend: LayerSplitBackend, lane: int, seed: int, num_tokens: int = NUM_TOKENS) -> None:
    backend.reset(lane)
    generator = torch.Generator().manual_seed(seed)
    for begin in range(0, num_tokens, 2048):
        tokens = torch.randint(3, 512, (min(2048, num_tokens - begin),), generator=generator)
        backend.prefill(lane, begin, tokens.tolist(), project=False)


def decode(backend: LayerSplitBackend, lane: int, begin: int, num_steps: int = 8) -> Tensor:
    steps = [
        backend.decode([lane], [begin + i], [i + 7]).whole()[0].clone() for i in range(num_steps)
    ]
    return torch.stack(steps)


def lane_tensors(backend: LayerSplitBackend, lane: int, num_tokens: int) -> dict[str, Tensor]:
    """The lane's tensors, copied synchronously."""
    torch.cuda.synchronize()
    cache = backend._stages[0]._shards[0].cache
    found = {}
    of_layers = zip(backend._spec.mixers, cache.layers, strict=True)
    for layer, (mixer, state) in enumerate(of_layers):
        for declared, tensor in zip((*mixer.rows, *mixer.end), state, strict=True):
            whole = tensor[lane, :num_tokens] if declared in mixer.rows else tensor[lane]
            found[f"ls0_{declared.name}.{layer}"] = whole.cpu()
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_nodes_lie_in_pinned_memory(backend: LayerSplitBackend):
    prefill(backend, 0, 1, 300)
    backend.nodes.save(0, "pinned", Span(0, 300, True))
    assert all(tensor.is_pinned() for tensor in backend.nodes.export("pinned").values())
    backend.nodes.drop("pinned")


def test_saves_beside_decoding_have_the_bits_of_the_moment(backend: LayerSplitBackend):
    prefill(backend, 0, 1)
    expected, nodes, tickets = [], [], []
    for i in range(4):  # more than staging has room for
        expected.append(lane_tensors(backend, 0, NUM_TOKENS + i))
        tickets.append(backend.nodes.save(0, f"moment{i}", Span(0, NUM_TOKENS + i, True)))
        nodes.append(f"moment{i}")
        backend.decode([0], [NUM_TOKENS + i], [i + 9])
    for node, tensors, ticket in zip(nodes, expected, tickets, strict=True):
        assert_same(backend.nodes.export(node), tensors)
        assert ticket.is_done
        backend.nodes.drop(node)


def test_small_saves_between_steps_have_the_bits_of_the_moment(tiny_dir: Path, arena: Arena):
    spec, devices = read_spec(tiny_dir), find_devices(["cuda:0"])
    sizes = {"parallel": 2, "max_ctx_tokens": 512, "prefill_chunk_tokens": None}
    plan = make_plan(spec, devices, precision=Precision.of("fp32"), weights=None, **sizes)
    backend = LayerSplitBackend.open(ModelFiles(tiny_dir), plan, memory=arena)
    prefill(backend, 0, 1, 100)
    expected = []
    for i in range(6):
        backend.nodes.save(0, f"small{i}", Span(0, 100 + i, True))
        expected.append(lane_tensors(backend, 0, 100 + i))
        backend.decode([0], [100 + i], [i + 9])
    for i, tensors in enumerate(expected):
        assert_same(backend.nodes.export(f"small{i}"), tensors)
    backend.nodes.restore(1, ["small0"], 100).wait()
    assert_same(lane_tensors(backend, 1, 100), expected[0])
    backend.close()


def test_a_lane_that_is_rewritten_at_once_does_not_change_its_node(backend: LayerSplitBackend):
    prefill(backend, 0, 2)
    expected = lane_tensors(backend, 0, NUM_TOKENS)
    backend.nodes.save(0, "before", Span(0, NUM_TOKENS, True))
    prefill(backend, 0, 3)
    assert_same(backend.nodes.export("before"), expected)
    backend.nodes.save(0, "after", Span(0, NUM_TOKENS, True))
    ticket = backend.nodes.restore(
        0, ["before"], NUM_TOKENS
    )  # over a lane that is still being saved
    ticket.wait()
    assert_same(lane_tensors(backend, 0, NUM_TOKENS), expected)
    assert not torch.equal(backend.nodes.export("after")["ls0_attn_k.7"], expected["ls0_attn_k.7"])
    for node in ("before", "after"):
        backend.nodes.drop(node)


def test_a_restore_is_before_what_runs_on_the_lane_and_beside_what_does_not(
    backend: LayerSplitBackend,
):
    prefill(backend, 0, 4)
    prefill(backend, 1, 5, 100)
    backend.nodes.save(0, "r", Span(0, NUM_TOKENS, True))
    own = decode(backend, 0, NUM_TOKENS)
    other = decode(backend, 1, 100)
    prefill(backend, 1, 5, 100)
    prefill(backend, 2, 6)
    backend.nodes.restore(2, ["r"], NUM_TOKENS)
    assert torch.equal(decode(backend, 1, 100), other)
    assert torch.equal(decode(backend, 2, NUM_TOKENS), own)  # the restore was not waited for
    backend.nodes.drop("r")


def test_a_node_that_is_dropped_on_its_way_still_arrives_where_it_should(
    backend: LayerSplitBackend, arena: Arena
):
    prefill(backend, 0, 7)
    expected = lane_tensors(backend, 0, NUM_TOKENS)
    backend.nodes.save(0, "gone", Span(0, NUM_TOKENS, True))
    ticket = backend.nodes.restore(1, ["gone"], NUM_TOKENS)
    backend.nodes.drop("gone")
    held = [arena.allocate(16 * PIECE_BYTES) for _ in range(3)]
    for region in held:
        region[:] = b"\xff" * (16 * PIECE_BYTES)
    ticket.wait()
    assert_same(lane_tensors(backend, 1, NUM_TOKENS), expected)
    assert all(bytes(region[:64]) == b"\xff" * 64 for region in held)


def test_a_restore_that_nobody_wants_any_more_leaves_a_fresh_lane(backend: LayerSplitBackend):
    prefill(backend, 0, 8)
    backend.nodes.save(0, "n", Span(0, NUM_TOKENS, True))
    prefill(backend, 1, 9, 500)
    expected = lane_tensors(backend, 1, 500)
    backend.nodes.restore(1, ["n"], NUM_TOKENS)
    prefill(backend, 1, 9, 500)
    assert_same(lane_tensors(backend, 1, 500), expected)
    backend.nodes.drop("n")


@pytest.mark.parametrize("num_tokens", [16, 4096])
def test_who_waits_for_copies_is_told_by_another_thread(
    backend: LayerSplitBackend, num_tokens: int
):
    prefill(backend, 0, 10, num_tokens)
    for copy in (
        lambda: backend.nodes.save(0, "n", Span(0, num_tokens, True)),
        lambda: backend.nodes.restore(1, ["n"], num_tokens),
    ):
        done = threading.Event()
        ticket = copy()
        ticket.when_done(done.set)
        assert done.wait(60)
        assert ticket.is_done
        ticket.wait()
    backend.nodes.drop("n")


def test_what_is_dropped_gives_its_memory_back(backend: LayerSplitBackend, arena: Arena):
    prefill(backend, 0, 11)
    free_bytes = arena.free_bytes
    for _ in range(6):
        backend.nodes.save(0, "n", Span(0, NUM_TOKENS, True))
        backend.nodes.export("n")  # waits for it
    backend.nodes.drop("n")
    backend.nodes.save(0, "small", Span(0, 1, False))  # frees what has arrived
    backend.nodes.drop("small")
    assert free_bytes - arena.free_bytes <= 2**20


@pytest.mark.parametrize("order", [None, [5, 2, 7, 0, 3, 6, 1, 4]])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=str)
def test_chains_go_between_a_gpu_and_any_split(
    tiny_dir: Path, arena: Arena, devices: list[str], order
):
    spec = read_spec(tiny_dir)
    logits = []
    chain = {"a": Span(0, 70, False), "b": Span(70, 150, True)}
    backends = []
    for names in (["cuda:0"], devices):
        found = find_devices(names)
        plan = make_plan(
            spec,
            found,
            precision=Precision.of("fp32"),
            weights=[1.0] * len(found),
            parallel=2,
            max_ctx_tokens=512,
            prefill_chunk_tokens=None,
        )
        with torch.inference_mode(), open_checkpoint(tiny_dir) as checkpoint:
            stage = LocalStage(spec, plan, checkpoint, memory=arena)
        backends.append(LayerSplitBackend(spec, plan, [stage], order))
    source, target = backends
    tokens = torch.randint(3, 500, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    for node, span in chain.items():
        source.prefill(0, span.begin, tokens[span.begin : span.end], project=False)
        source.nodes.save(0, node, span)
        target.nodes.adopt(node, span, source.nodes.export(node))
    for one in backends:
        one.nodes.restore(1, list(chain), 150)
        logits.append(decode(one, 1, 150).cpu())
    for node in chain:
        given, taken = source.nodes.export(node), target.nodes.export(node)
        assert sorted(t.data_ptr() for t in given.values()) == sorted(
            t.data_ptr() for t in taken.values()
        )
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    for one in backends:
        one.close()


def test_windows_are_saved_from_where_they_are_before_anything_changes_them(arena: Arena):
    """By the next chunk, by steps or by a reset right behind the save."""
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 8}
    config = {name: WIDE[name] for name in WIDE if "linear" not in name and "rope" not in name}
    windows = {"model_type": "mistral", "sliding_window": 2048, **sizes}
    spec = parse_spec(config | windows)
    plan = make_plan(
        spec,
        find_devices(["cuda:0"]),
        precision=Precision.of("bf16"),
        weights=None,
        parallel=2,
        max_ctx_tokens=NUM_TOKENS + 512,
        prefill_chunk_tokens=2048,
    )
    source = RandomSource(torch.bfloat16, torch.device("cuda:0"))
    backend = LayerSplitBackend.load(spec, plan, source, memory=arena)
    prefill(backend, 0, 5)
    backend.nodes.save(0, "quiet", Span(0, NUM_TOKENS, with_state=True)).wait()
    expected = backend.nodes.export("quiet")
    for number, disturb in enumerate(
        (
            lambda: decode(backend, 0, NUM_TOKENS),
            lambda: backend.prefill(0, NUM_TOKENS, [5] * 256, project=False),
            lambda: backend.reset(0),
        )
    ):
        prefill(backend, 0, 5)
        saved = backend.nodes.save(0, f"disturbed {number}", Span(0, NUM_TOKENS, with_state=True))
        disturb()
        saved.wait()
        found = backend.nodes.export(f"disturbed {number}")
        assert_same(found, expected)
        backend.nodes.drop(f"disturbed {number}")
    backend.nodes.drop("quiet")
    backend.close()
