"""DFlash2: tokens that a selector chooses are its slow truth's, as chains and as trees."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from luceasync.errors import ModelError
from luceasync.models.encodings import WeightPlacement
from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.ranking.proposals import DraftCandidates, ranked_tree
from luceasync.speculation.dflash.dflash2 import selecting_head
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import read_draft_spec
from luceasync.speculation.dflash.draft_files import DraftFiles
from luceasync.speculation.dflash.graph import NUM_EAGER_CALLS, GraphRunner
from luceasync.speculation.dflash.weights import read_selector
from tests import tiny
from tests.reference.dflash import Mistake, SlowDrafter, residuals
from tests.speculation.dflash.test_graph import Again

PLACE = {"dtype": torch.float32, "device": torch.device("cpu")}
BLOCK, BEGIN = 8, 40


class Drafted:
    """A tiny target, and a drafter with a selector: as it is run, and slow."""

    def __init__(self, folder) -> None:
        self.target = tiny.build("qwen3")
        spec = read_spec(tiny.save(self.target, folder / "target"))
        self.folder = tiny.save_draft(folder / "draft", tiny.draft_config(**tiny.DFLASH2), seed=5)
        self.spec = read_draft_spec(self.folder, spec)
        embed = self.target.get_input_embeddings()
        sizes = {"num_lanes": 2, "max_ctx_tokens": 128}
        self.network = open_network(self.folder, self.spec, TorchOps(), embed, **sizes, **PLACE)
        place = WeightPlacement(TorchOps(), PLACE["device"], PLACE["dtype"])
        selector = read_selector(DraftFiles(self.folder), self.spec, place)
        assert selector is not None
        assert selector.num_bytes == self.spec.selector_bytes(4)
        self.head = selecting_head(selector, self.candidates_from)

    def candidates_from(self, hidden, num_candidates):
        best, ids = self.target.get_output_embeddings()(hidden).topk(num_candidates)
        return DraftCandidates(ids, best)

    @torch.no_grad()
    def write(self, ids, lane, end) -> None:
        features = residuals(self.target, ids[:end], self.spec.taps)[None]
        self.network.write_context(features, *map(torch.tensor, ([lane], [0], [end])))

    @torch.no_grad()
    def propose(self, anchors, lanes, begins, block=BLOCK, budget=None):
        anchors = torch.tensor(anchors)
        given = torch.tensor(lanes), torch.tensor(begins)
        hidden = self.network.propose(anchors, *given, block)
        return self.head(hidden, anchors, budget)


@pytest.fixture(scope="module")
def drafted(tmp_path_factory) -> Drafted:
    return Drafted(tmp_path_factory.mktemp("dflash2"))


@pytest.fixture
def ids():
    return torch.randint(4, tiny.VOCAB_SIZE, (60,), generator=torch.manual_seed(1)).tolist()


@torch.no_grad()
def slow(drafted, ids, begin, block=BLOCK, second=""):
    truth = SlowDrafter(drafted.folder, drafted.target, Mistake(second=second))
    return truth.propose(ids, begin, block)


@pytest.mark.parametrize("block", [2, 3, BLOCK])
def test_a_chain_is_the_slow_truths(drafted, ids, block):
    other = ids[::-1]
    drafted.write(ids, 0, BEGIN)
    drafted.write(other, 1, 50)
    found = drafted.propose([other[50], ids[BEGIN]], [1, 0], [50, BEGIN], block)
    assert found.parents is None
    assert found.tokens[0].tolist() == [other[50], *slow(drafted, other, 50, block)]
    assert found.tokens[1].tolist() == [ids[BEGIN], *slow(drafted, ids, BEGIN, block)]


def test_each_mistake_would_be_caught(drafted, ids):
    drafted.write(ids, 0, 50)
    ends = range(30, 50)

    def proposals(second):
        return [slow(drafted, ids, end, 4, second) for end in ends]

    right = proposals("")
    for second in ("output", "sides", "late cap", "no chain"):
        assert proposals(second) != right, second


def test_a_tree_has_the_most_probable_paths():
    slots, num_ranked, vocab, budget = 3, 4, 9, 12
    generator = torch.manual_seed(3)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:num_ranked] for _ in range(6)])
    ids, follows = ids.view(2, slots, num_ranked), torch.randn(slots, vocab, num_ranked) * 2
    anchors = torch.tensor([2, 5])
    tree = ranked_tree(anchors, ids, lambda slot, before: follows[slot, before], budget)
    logprobs = follows.log_softmax(-1)
    for entry, anchor in enumerate(anchors.tolist()):
        sums = {}
        for depth in range(1, slots + 1):
            for ranks in itertools.product(range(num_ranked), repeat=depth):
                tokens = [anchor, *(int(ids[entry, s, r]) for s, r in enumerate(ranks))]
                scores = [logprobs[s, tokens[s], r] for s, r in enumerate(ranks)]
                sums[(*tokens,)] = float(sum(scores))
        best = sorted(sums, key=sums.__getitem__, reverse=True)[:budget]
        tokens, parents = tree.tokens[entry].tolist(), tree.parents[entry].tolist()
        paths = [(anchor,)]
        for row in range(1, budget + 1):
            assert parents[row] < row
            paths.append((*paths[parents[row]], tokens[row]))
        assert set(paths[1:]) == set(best)


def test_the_tree_of_a_drafter_holds_its_chain(drafted, ids):
    """The best token of a slot behind the best ones before it is of the tree, if that is deep."""
    drafted.write(ids, 0, BEGIN)
    chain = drafted.propose([ids[BEGIN]], [0], [BEGIN], 3).tokens[0].tolist()
    tree = drafted.propose([ids[BEGIN]], [0], [BEGIN], 3, budget=42)  # all of 6 + 36
    paths = [(ids[BEGIN],)]
    for token, parent in zip(
        tree.tokens[0, 1:].tolist(), tree.parents[0, 1:].tolist(), strict=True
    ):
        paths.append((*paths[parent], token))
    assert (*chain,) in paths and len(set(paths)) == 43


def test_a_captured_pass_proposes_what_its_operations_do(drafted, ids):
    drafted.write(ids, 0, 50)
    run = GraphRunner(Again())

    @torch.no_grad()
    def work(anchors, begins):
        hidden = drafted.network.propose(anchors, torch.tensor([0]), begins, 4)
        return drafted.head(hidden, anchors, None).tokens

    for begin in range(40, 44 + NUM_EAGER_CALLS):
        given = torch.tensor([ids[begin]]), torch.tensor([begin])
        assert torch.equal(run("key", work, *given), work(*given))
    run.close()


@pytest.mark.slow
def test_no_pass_looks_at_a_value(drafted, ids):
    drafted.write(ids, 0, BEGIN)
    anchors, lanes, begins = (torch.tensor([n]) for n in (ids[BEGIN], 0, BEGIN))

    @torch.compile(backend="eager", fullgraph=True)  # a look at a value would break the graph
    def propose():
        hidden = drafted.network.propose(anchors, lanes, begins, BLOCK, reach=64)
        found = drafted.candidates_from(hidden, 6)
        return drafted.head(hidden, anchors, None).tokens, found.ids

    with torch.no_grad():
        assert propose()[0].tolist()[0][1:] == slow(drafted, ids, BEGIN)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("conv_group_size", 24, "conv_group_size = 24: a divisor of hidden_size 64"),
        ("conv_kernel_size", None, "conv_kernel_size = None: a positive integer"),
        ("selector_rank", 0, "selector_rank = 0: a positive integer"),
        ("selector_top_k", 999, "selector_top_k = 999: at most"),
        ("final_logit_softcapping", -2.0, "final_logit_softcapping = -2.0: a positive number"),
    ],
)
def test_a_config_that_cannot_be_is_refused(drafted, tmp_path, field, value, words):
    config = tiny.draft_config(**tiny.DFLASH2)
    config["dflash_config"] = config["dflash_config"] | {field: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        read_draft_spec(tmp_path, read_spec(drafted.folder.parent / "target"))
