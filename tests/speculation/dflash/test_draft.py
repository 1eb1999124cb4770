"""The draft network against its slow reference: the same weights, hidden rows and proposals, with
all operations on the context.

The usual mistakes, put into the reference, must each be caught by the same comparison.
"""

import pytest
import torch

from luceasync.kernels import draft_attention
from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash import context
from luceasync.speculation.dflash.context import reach_for
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import adjusted, read_draft_spec
from luceasync.speculation.dflash.draft_ops import TorchDraftOps
from luceasync.speculation.dflash.triton_draft_ops import TritonDraftOps
from tests import tiny
from tests.reference.dflash import Mistake, SlowDrafter, greedy_loop, residuals

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numbers that fill up
    pytest.mark.usefixtures("quick_interpreter"),
]

NUM_LANES, MAX_CTX = 3, 256
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BODIES = {"torch": (TorchDraftOps, torch.device("cpu")), "triton": (TritonDraftOps, GPU)}
SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}
# Poolside's drafters: norms of taps and of context, gates of heads, windows in all layers.
LAGUNA = SLIDING | {
    "architectures": ["DFlashLagunaForCausalLM"],
    "layer_types": ["sliding_attention"] * 3,
    "rope_theta": 10000.0,
}
TOLERANCE = {"atol": 2e-4, "rtol": 2e-4}
MISTAKES = [
    Mistake(tap_shift=1),
    Mistake(anchor_seen=True),
    Mistake(flip_causal=True),
    Mistake(relative=True),
    Mistake(window_shift=1),
    Mistake(window_shift=-1),
]


IN_TORCH = pytest.mark.parametrize("target", [(f, "torch") for f in tiny.FAMILIES], indirect=True)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", "torch"),
        ("qwen3_5", "torch"),
        pytest.param(("qwen3", "triton"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def target(request, tmp_path_factory):
    """Model, its spec, and its operations on the context."""
    family, body = request.param
    model = tiny.build(family)
    folder = tiny.save(model, tmp_path_factory.mktemp(family))
    return model, read_spec(folder), body


@pytest.fixture(autouse=True)
def few_splits(monkeypatch):
    """So that short contexts have splits of several chunks, and the interpreter little to do."""
    monkeypatch.setattr(draft_attention, "NUM_SPLITS", 2)


@pytest.fixture
def ids():
    return torch.randint(4, tiny.VOCAB_SIZE, (150,), generator=torch.manual_seed(1)).tolist()


class Pair:
    """A drafter twice: as the engine runs it, and slow."""

    def __init__(self, target, folder, fields, adjustments=None):
        self.model, spec, body = target
        self.folder = tiny.save_draft(folder, tiny.draft_config(**fields), seed=5)
        self.spec = adjusted(read_draft_spec(self.folder, spec), **adjustments or {})
        choose, device = BODIES[body]
        self.place = {"dtype": torch.float32, "device": device}
        self.fast = open_network(
            self.folder,
            self.spec,
            TorchOps(),
            lambda ids: self.model.get_input_embeddings()(ids.cpu()).to(device),
            num_lanes=NUM_LANES,
            max_ctx_tokens=MAX_CTX,
            choose=choose,
            **self.place,
        )

    @torch.no_grad()
    def write(self, ids, lane, begin, end, num_rows):
        """Features of positions [begin, end), in writes of `num_rows` rows."""
        features = residuals(self.model, ids[:end], self.spec.taps)
        for at in range(begin, end, num_rows):
            rows = features[at : min(at + num_rows, end)]
            filled = torch.full((1, num_rows, rows.shape[1]), 99.0)
            filled[0, : len(rows)] = rows
            self.write_rows(filled, [lane], [at], [len(rows)])

    @torch.no_grad()
    def write_rows(self, features, lanes, begins, counts):
        rows = features.to(self.place["device"])
        self.fast.write_context(rows, *self.ints(lanes, begins, counts))

    @torch.no_grad()
    def hidden(self, ids, lane, begin, block=8, **options):
        return self.propose([ids[begin]], [lane], [begin], block, **options)[0]

    @torch.no_grad()
    def propose(self, anchors, lanes, begins, block, **options):
        given = self.ints(lanes, begins, anchors)
        return self.fast.propose(given[2], *given[:2], block, **options).cpu()

    @torch.no_grad()
    def truth(self, ids, begin, block=8, mistake=Mistake()):  # noqa: B008
        return SlowDrafter(self.folder, self.model, mistake).hidden(ids, begin, block)

    def ints(self, lanes, *columns):
        device = self.place["device"]
        given = [torch.tensor(column, device=device) for column in columns]
        return torch.tensor(lanes, dtype=torch.int32, device=device), *given


@pytest.mark.covered(2)
@pytest.mark.parametrize(
    "fields",
    [
        *({}, SLIDING, SLIDING | {"is_causal": False}),
        *(LAGUNA, LAGUNA | {"gating": "per-element"}),
        *(tiny.DFLASH2, SLIDING | tiny.DFLASH2),
    ],
)
@pytest.mark.parametrize("begin", [1, 20, 140])
def test_hidden_rows_are_the_slow_truths(target, ids, tmp_path, fields, begin):
    pair = Pair(target, tmp_path, fields)
    pair.write(ids, 1, 0, begin, num_rows=48)
    torch.testing.assert_close(pair.hidden(ids, 1, begin), pair.truth(ids, begin), **TOLERANCE)


@pytest.mark.slow
def test_proposals_of_a_whole_greedy_answer_are_the_slow_truths(target, ids, tmp_path):
    pair = Pair(target, tmp_path, SLIDING)
    slow = SlowDrafter(pair.folder, pair.model)
    num_tokens = 24 if target[2] == "torch" else 6
    answer, rounds = greedy_loop(slow, ids[:30], num_tokens, block=8)
    told, begin = ids[:30] + answer, 30
    pair.write(told, 0, 0, begin, num_rows=48)
    for emitted in rounds:
        drafts = pair.model.get_output_embeddings()(pair.hidden(told, 0, begin)).argmax(-1)
        with torch.no_grad():
            assert drafts.tolist() == slow.propose(told[: begin + 1], begin, 8)
        pair.write(told, 0, begin, begin + emitted, num_rows=8)
        begin += emitted


def test_each_mistake_would_be_caught(target, ids, tmp_path):
    pair = Pair(target, tmp_path, SLIDING)
    pair.write(ids, 0, 0, 100, num_rows=48)
    hidden = pair.hidden(ids, 0, 100)
    for mistake in MISTAKES:
        wrong = pair.truth(ids, 100, mistake=mistake)
        assert (hidden - wrong).abs().max() > 50 * TOLERANCE["atol"], mistake


@IN_TORCH
def test_a_ring_that_did_not_wrap_would_be_caught(target, ids, tmp_path, monkeypatch):
    def clamped(rows, capacity):
        return torch.where(rows.kept & (rows.positions < capacity), rows.positions, capacity)

    monkeypatch.setattr(context, "places", clamped)
    pair = Pair(target, tmp_path, SLIDING)
    pair.write(ids, 0, 0, 140, num_rows=48)
    assert (pair.hidden(ids, 0, 140) - pair.truth(ids, 140)).abs().max() > 0.01


def test_one_write_may_bring_more_rows_than_a_ring_holds(target, ids, tmp_path):
    pair = Pair(target, tmp_path, SLIDING)
    pair.write(ids, 2, 0, 140, num_rows=140)
    assert {ring.capacity for ring in pair.fast.context.rings} == {64, MAX_CTX}
    torch.testing.assert_close(pair.hidden(ids, 2, 140), pair.truth(ids, 140), **TOLERANCE)


def test_lanes_do_not_mix_and_padding_does_nothing(target, ids, tmp_path):
    pair = Pair(target, tmp_path, {})
    other = ids[::-1]
    pair.write(ids, 0, 0, 40, num_rows=48)
    pair.write(other, 2, 0, 70, num_rows=48)
    pair.write_rows(torch.full((1, 4, 192), 7.0), [-1], [0], [4])
    both = pair.propose([other[70], 0, ids[40]], [2, -1, 0], [70, 0, 40], 8)
    assert both.isfinite().all()
    torch.testing.assert_close(both[0], pair.truth(other, 70), **TOLERANCE)
    torch.testing.assert_close(both[2], pair.truth(ids, 40), **TOLERANCE)


def test_rows_beyond_the_count_are_not_kept(target, ids, tmp_path):
    pair = Pair(target, tmp_path, {})
    pair.write(ids, 0, 0, 40, num_rows=48)
    before = pair.hidden(ids, 0, 40)
    pair.write_rows(torch.full((1, 8, 192), 7.0), [0], [38], [0])
    torch.testing.assert_close(pair.hidden(ids, 0, 40), before)


@IN_TORCH  # the kernels read what a row sees
@pytest.mark.parametrize("fields", [{}, SLIDING])
def test_reading_fewer_places_changes_nothing(target, ids, tmp_path, fields):
    pair = Pair(target, tmp_path, fields)
    pair.write(ids, 0, 0, 100, num_rows=48)
    torch.testing.assert_close(pair.hidden(ids, 0, 100, reach=128), pair.hidden(ids, 0, 100))


def test_context_that_was_never_written_is_not_seen(target, ids, tmp_path):
    pair = Pair(target, tmp_path, {})
    pair.write(ids, 0, 0, 90, num_rows=48)
    pair.fast.set_valid_from(0, 60)
    limited = Pair(target, tmp_path, {}, {"ctx_max_tokens": 30})
    limited.write(ids, 0, 0, 90, num_rows=48)
    torch.testing.assert_close(pair.hidden(ids, 0, 90), limited.hidden(ids, 0, 90), **TOLERANCE)
    assert (pair.hidden(ids, 0, 90) - pair.truth(ids, 90)).abs().max() > 0.01


@IN_TORCH
def test_a_window_from_a_flag_is_that_of_a_drafter_with_it(target, ids, tmp_path):
    pair = Pair(target, tmp_path, SLIDING, {"swa_window_tokens": 12})
    pair.write(ids, 0, 0, 100, num_rows=48)
    narrow = Mistake(window_shift=12 - SLIDING["sliding_window"])
    truth = pair.truth(ids, 100, mistake=narrow)
    torch.testing.assert_close(pair.hidden(ids, 0, 100), truth, **TOLERANCE)


def test_fewer_rows_see_fewer_masks(target, ids, tmp_path):
    pair = Pair(target, tmp_path, {}, {"block": 4})
    pair.write(ids, 0, 0, 50, num_rows=48)
    short = pair.hidden(ids, 0, 50, block=pair.spec.block)
    torch.testing.assert_close(short, pair.truth(ids, 50, block=4), **TOLERANCE)


@pytest.mark.slow
@IN_TORCH
def test_no_pass_looks_at_a_value(target, ids, tmp_path):
    pair = Pair(target, tmp_path, SLIDING)
    lanes, begins, counts = pair.ints([1, -1], [40, 0], [3, 0])
    features = torch.ones(2, 4, pair.spec.feature_size)

    @torch.compile(backend="eager", fullgraph=True)  # a look at a value would break the graph
    def round_of_drafting():
        pair.fast.write_context(features, lanes, begins, counts)
        return pair.fast.propose(begins, lanes, begins + counts, 8, reach=64)

    with torch.no_grad():
        assert round_of_drafting().isfinite().all()


@pytest.mark.parametrize("fields", [SLIDING, LAGUNA, tiny.DFLASH2])
def test_what_is_held_is_what_the_spec_counts_and_is_let_go(target, tmp_path, fields):
    pair = Pair(target, tmp_path, fields)
    spec, fast = pair.spec, pair.fast
    places = [spec.block + spec.capacity(layer, MAX_CTX) + 1 for layer in range(spec.num_layers)]
    context_bytes = 4 * 2 * (NUM_LANES + 1) * sum(places) * spec.attention.kv_dim
    assert fast.num_bytes == spec.weight_bytes(4) + context_bytes
    fast.close()
    fast.close()
    assert fast.num_bytes == 0


@pytest.mark.parametrize(
    ("position", "reach"), [(0, 256), (256, 256), (257, 384), (385, 512), (513, 768), (5000, 6144)]
)
def test_few_reaches_come_up(position, reach):
    assert reach_for(position) == reach
