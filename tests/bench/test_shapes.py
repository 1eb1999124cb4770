"""What a pass over a well-known shape cannot avoid."""

import psutil
import pytest

from luceasync.bench.model import plan_for
from luceasync.bench.shapes import (
    AGENTS,
    SHAPES,
    SMALL,
    encoding_of,
    prefill_flops,
    step_bytes,
)
from luceasync.models.encodings import DenseEncoding
from luceasync.models.files import parse_spec
from luceasync.models.quant.ggml import ENCODINGS


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_one_that_can_be_run(name: str) -> None:
    sizes = {"qwen3-0.6b": 0.6, "qwen3-4b": 4.0, "qwen3.5-4b": 4.2, "qwen3.5-27b": 26.9}
    sizes |= {"qwen3.5-35b-a3b": 34.7, "qwen3.5-35b-a3b-8": 7.75}
    sizes |= dict.fromkeys(("gemma3-4b", "gemma3-4b-full"), 3.88) | {"gemma4-31b-12": 7.27}
    parameters = parse_spec(dict(SHAPES[name])).num_parameters
    assert parameters / 1e9 == pytest.approx(sizes[name], rel=0.03)


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned here is not loaded: the memory that is free just now decides nothing."""
    memory = psutil.virtual_memory()._replace(available=1 << 40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


def bytes_of(shape, num_lanes: int, context: int) -> int:
    plan = plan_for(shape, ["cpu:0"], parallel=2, max_ctx_tokens=256)
    spec = parse_spec(dict(shape))
    return step_bytes(spec, plan, num_lanes, context, lambda name: DenseEncoding())


def test_a_step_reads_weights_once_and_the_rows_of_each_lane() -> None:
    shape = SMALL["qwen3"]
    row = 2 * 2 * 2 * 64 * 4  # bytes x (key and value) x heads x head_dim x layers
    weights = 2 * parse_spec(dict(shape)).num_parameters
    assert bytes_of(shape, 1, 0) == pytest.approx(weights, rel=0.01)  # norms are float32
    assert bytes_of(shape, 2, 100) - bytes_of(shape, 1, 0) == 200 * row


def test_a_step_reads_the_experts_that_its_rows_choose() -> None:
    shape = SHAPES["qwen3.5-35b-a3b-8"]
    one, four = (bytes_of(shape, num_lanes, 0) for num_lanes in (1, 4))
    states = bytes_of(SHAPES["qwen3.5-35b-a3b-8"] | {"num_experts_per_tok": 256}, 4, 0)
    expert_bytes = 2 * 3 * 2048 * 512
    distinct = 256 * (1 - (1 - 8 / 256) ** 4)
    assert states - four == pytest.approx(8 * (256 - distinct) * expert_bytes, rel=1e-6)
    assert four - one > 8 * (distinct - 8) * expert_bytes


def test_a_step_reads_and_writes_the_recurrent_states() -> None:
    shape = SMALL["qwen3_5"]
    plan = plan_for(shape, ["cpu:0"], parallel=2, max_ctx_tokens=256)
    state = sum(shard.lane_state_bytes for shard in plan.shards)
    assert bytes_of(shape, 2, 0) - bytes_of(shape, 1, 0) == 2 * state > 0


def test_a_step_reads_what_was_written_of_windows() -> None:
    shape = SHAPES["gemma3-4b"] | {"num_hidden_layers": 6}
    row = 2 * 2 * 4 * 256  # bytes x (key and value) x heads x head_dim
    for context, num_rows in ((100, 600), (3000, 5 * 1024 + 3000)):
        one, two = (bytes_of(shape, num_lanes, context) for num_lanes in (1, 2))
        assert two - one == num_rows * row


def test_a_state_of_the_small_agents_is_as_many_rows_as_one_of_the_large_model() -> None:
    four_layers = SHAPES["qwen3.5-27b"] | {"num_hidden_layers": 4, "vocab_size": 1024}
    rows = []
    for shape, dtype in ((four_layers, "bf16"), (AGENTS, "fp32")):
        plan = plan_for(shape, ["cpu:0"], parallel=1, max_ctx_tokens=256, dtype=dtype)
        rows.append(plan.shards[0].lane_state_bytes / plan.shards[0].token_bytes)
    assert rows[1] == pytest.approx(rows[0], rel=0.1)


def test_of_an_untied_embedding_only_rows_are_read() -> None:
    tied, untied = ({**SMALL["qwen3"], "tie_word_embeddings": is_tied} for is_tied in (True, False))
    assert bytes_of(tied, 1, 0) == bytes_of(untied, 1, 0)


def test_prefill_computes_layers_for_every_token_and_attends_to_half_of_the_pairs() -> None:
    spec = parse_spec(dict(SMALL["qwen3_5"]))
    layers = sum(map(spec.num_layer_parameters, range(spec.num_layers)))
    query_dim, num_attention = 2 * 64, 2  # one layer in four of eight
    flops = prefill_flops(spec, 10)
    assert flops == 2 * layers * 10 + num_attention * 2 * 100 * query_dim


def test_medium_files_have_a_type_for_the_matrices_of_an_mtp_head() -> None:
    encoding = encoding_of("Q4_K_M", num_layers=64)
    assert encoding("mtp.fc.weight") == ENCODINGS["Q4_K"]
    assert encoding("mtp.norm.weight") == DenseEncoding()
