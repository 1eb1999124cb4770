"""Families of dense layers and of experts say what transformers says, however the work is cut,
shared out or drafted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from luceasync.host_cache.nodes import Span
from luceasync.models.encodings import WeightPlacement
from luceasync.models.families import family_of
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.loader import TensorReader
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.ops import TorchOps
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from tests import tiny
from tests.families import MODELS, OWN_WAYS, answer_of, build

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel

NUM_PROMPT, NUM_ANSWER = 182, 28  # the answer goes over the end of a page
PROMPT = [(7 * i) % 500 + 3 for i in range(NUM_PROMPT)]
PROMPTS = {0: PROMPT} | {
    lane: [(11 * i + lane) % 500 + 3 for i in range(20 + 40 * lane)] for lane in (1, 2, 3)
}
SHUFFLED = [5, 2, 7, 0, 3, 6, 1, 4]
# The row that each row of a draft follows, and the rows that are right: chains, and trees.
DRAFTS = [
    ((ROOT, 0, 1, 2), [0]),
    ((ROOT, 0, 0, 2), [0, 2, 3]),
    ((ROOT, 0, 1, 2), [0, 1, 2]),
    ((ROOT, 0, 0, 1), [0, 1, 3]),
    ((ROOT, 0, 0, 0), [0, 3]),
]


# Of what layers keep, families that keep it alike prove the same.
own_ways = pytest.mark.parametrize(
    "peer",
    [pytest.param(name, marks=[] if name in OWN_WAYS else pytest.mark.thorough) for name in MODELS],
    indirect=True,
)


@pytest.fixture(scope="module", params=MODELS)
def peer(request: pytest.FixtureRequest) -> PreTrainedModel:
    """The model as transformers runs it."""
    return build(request.param)


@pytest.fixture(scope="module")
def model_dir(peer: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    peer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(peer: PreTrainedModel) -> Tensor:
    """Logits of every token of the prompt and of its greedy answer."""
    answer = answer_of(peer, PROMPT, NUM_ANSWER)
    with torch.inference_mode():
        logits: Tensor = peer(torch.tensor([PROMPT + answer])).logits[0]
    assert len({*answer}) > 8, "few tokens again and again would say little"
    assert answer == logits[NUM_PROMPT - 1 : -1].argmax(-1).tolist()
    return logits


def most_shards(model_dir: Path, num_shards: int) -> int:
    """`num_shards`, or 1 if no layer can be on another device than the others."""
    return 1 if read_spec(model_dir).layer_inputs else num_shards


def prefilled(backend: LayerSplitBackend, lane: int, ids: list[int], chunk: int) -> Tensor:
    """Logits after each chunk."""
    backend.reset(lane)
    return torch.stack(
        [
            backend.prefill(lane, begin, ids[begin : begin + chunk], project=True).flatten()
            for begin in range(0, len(ids), chunk)
        ]
    )


def greedy(backend: LayerSplitBackend, prompts: dict[int, list[int]], num_tokens: int) -> dict:
    """Answers of lanes that step together."""
    out = {
        lane: [int(prefilled(backend, lane, ids, 64)[-1].argmax())] for lane, ids in prompts.items()
    }
    for step in range(num_tokens - 1):
        positions = [len(ids) + step for ids in prompts.values()]
        logits = backend.decode([*prompts], positions, [out[lane][-1] for lane in prompts]).whole()
        for lane, token in zip(prompts, logits.argmax(-1).tolist(), strict=True):
            out[lane].append(token)
    return out


@pytest.mark.slow
def test_logits_are_the_peers_for_every_chunking(make_backend, model_dir: Path, expected: Tensor):
    backend = make_backend(model_dir)
    for chunk in (1, 7, 63, 64, 65, NUM_PROMPT):
        num_tokens = min(NUM_PROMPT, 30 + 5 * chunk)  # more than most windows
        ends = [min(at + chunk, num_tokens) - 1 for at in range(0, num_tokens, chunk)]
        logits = prefilled(backend, 0, PROMPT[:num_tokens], chunk)
        torch.testing.assert_close(logits, expected[ends], rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("num_shards", [3, 2, 1])
def test_greedy_tokens_are_the_peers_on_any_split(
    make_backend, model_dir: Path, expected: Tensor, num_shards: int
):
    num_shards = most_shards(model_dir, num_shards)
    backend = make_backend(model_dir, num_shards=num_shards, page_order=SHUFFLED)
    tokens = expected[NUM_PROMPT - 1 :].argmax(-1).tolist()[:NUM_ANSWER]
    assert greedy(backend, {2: PROMPT}, NUM_ANSWER) == {2: tokens}


@own_ways
def test_lanes_that_step_together_are_each_as_alone(make_backend, model_dir: Path):
    backend = make_backend(model_dir)
    alone = {lane: greedy(backend, {lane: ids}, 5)[lane] for lane, ids in PROMPTS.items()}
    assert greedy(backend, PROMPTS, 5) == alone


@own_ways
@pytest.mark.slow
def test_drafts_right_or_wrong_change_no_token(make_backend, model_dir: Path, expected: Tensor):
    backend = make_backend(model_dir, num_shards=most_shards(model_dir, 2), verify_rows=(4,))
    tokens = expected[NUM_PROMPT - 1 :].argmax(-1).tolist()
    spoken, rounds = [int(prefilled(backend, 1, PROMPT, 64)[-1].argmax())], 0
    while len(spoken) < 20:
        parents, path = DRAFTS[rounds % len(DRAFTS)]
        right = tokens[len(spoken) : len(spoken) + 3]
        rows = [spoken[-1], *((token + 1) % tiny.VOCAB_SIZE for token in right)]
        for depth, row in enumerate(path[1:]):
            rows[row] = right[depth]
        begin = NUM_PROMPT + len(spoken) - 1
        tree = torch.tensor([parents], dtype=torch.int32)
        logits = backend.verify([1], [begin], torch.tensor([rows]), tree).whole()[0]
        found = logits.argmax(-1).tolist()
        assert [found[row] for row in path[:-1]] == right[: len(path) - 1]
        backend.commit([path])
        spoken += [found[row] for row in path]
        rounds += 1
    assert spoken == tokens[: len(spoken)]


@own_ways
@pytest.mark.slow
def test_spans_of_any_length_go_on_in_another_lane_and_under_another_split(
    make_backend, peer: PreTrainedModel, model_dir: Path
):
    """Of a token, of a window, and of one less and one more."""
    source = make_backend(model_dir)
    target = make_backend(model_dir, num_shards=most_shards(model_dir, 3), page_order=SHUFFLED)
    attentions = [each for each in read_spec(model_dir).mixers if isinstance(each, AttentionSpec)]
    window = max(each.window for each in attentions) or 24
    tokens = [(11 * i) % 500 + 3 for i in range(3 * window + 4)]
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0]
    names: list[str] = []
    end = 0
    for num_tokens in (1, window - 1, window, window + 1):
        span = Span(end, end + num_tokens, True)
        names.append(f"{num_tokens} tokens")
        source.prefill(0, end, tokens[end : span.end], project=False)
        source.nodes.save(0, names[-1], span)
        target.nodes.adopt(names[-1], span, source.nodes.export(names[-1]))
        end = span.end
        for backend, lane in ((source, 2), (target, 1)):
            backend.nodes.restore(lane, names, end)
            for at in range(end, end + 3):
                logits = backend.decode([lane], [at], [tokens[at]]).whole()[0]
                torch.testing.assert_close(logits, expected[at], rtol=0, atol=1e-4)


@own_ways
@pytest.mark.slow
def test_a_prompt_that_exceeds_its_pool_is_what_it_is_without(
    make_backend, peer: PreTrainedModel, model_dir: Path
):
    prompt = [(13 * i) % 500 + 3 for i in range(700)]
    sizes = {"max_ctx_tokens": 1024, "chunk_tokens": 192, "pool_tokens": 512}
    backend = make_backend(model_dir, num_shards=most_shards(model_dir, 2), **sizes)
    logits = prefilled(backend, 1, prompt, 192)[-1]
    with torch.inference_mode():
        expected = peer(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    backend.decode([1], [700], [int(logits.argmax())]).whole()  # with absent chunks


def test_the_bytes_that_are_held_are_those_planned(make_backend, model_dir: Path):
    [shard] = make_backend(model_dir).plan.shards
    spec, place = (
        read_spec(model_dir),
        WeightPlacement(TorchOps(), torch.device("cpu"), torch.float32),
    )
    with ModelFiles(model_dir).weights.open() as source:
        reader, family = TensorReader(source, spec, place), family_of(spec)
        layers = [family.read_layer(reader, layer) for layer in range(spec.num_layers)]
        ends = family.read_ends(reader, is_first=True, is_last=True)
    assert sum(layer.num_bytes for layer in layers) + ends.num_bytes == shard.weight_bytes
