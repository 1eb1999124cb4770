"""A drafter in a process of its own proposes what one in this process does, from the same rows."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig, PlacementConfig
from luceasync.errors import DraftFailed
from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.request import Sampling
from luceasync.speculation.choice import RoundShape
from luceasync.speculation.dflash import wire
from luceasync.speculation.dflash.feature_contents import FeaturePart
from luceasync.speculation.dflash.load import LoadedDraft, load_draft, start_draft
from luceasync.speculation.dflash.placement import plan_with_drafter
from luceasync.speculation.dflash.process import DraftProcessResources
from luceasync.text.tokenizer import Tokenizer
from tests import tiny
from tests.processes import backend_program
from tests.speculation.scripted import plain_answers, prepare, random_prompt, speculated_answers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_backends")]

TRANSPORTS = ["shared", "stream"]
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 65}  # of 64 rows
TOKENS = random_prompt(1, 200)
CHAIN, TREE = RoundShape(8), RoundShape(8, 12)
NODE_BYTES = 8 << 20


class Both:
    """A target with the same drafter twice: in this process, and in one of its own."""

    def __init__(self, model_dir: Path, folder: Path, transport: str, fields: dict) -> None:
        draft_dir = tiny.save_draft(folder / "draft", tiny.draft_config(**fields))
        draft = DraftConfig(
            draft_dir,
            device="hip:0",
            ipc_bin=backend_program(folder, ["hip:0=cpu:0"]),
            ddtree=True,
            ddtree_budget=12,
        )
        config = Config(
            model=ModelConfig(model_dir, dtype="fp32"),
            placement=PlacementConfig(("cpu:0", "cpu:1"), ipc_transport=transport),
            engine=EngineConfig(parallel=4, max_ctx_tokens=256),
            draft=draft,
        )
        report, drafter = plan_with_drafter(config)
        assert drafter is not None and drafter.program is not None
        self.plan, self.drafter = report.plan, drafter
        taps = drafter.spec.taps
        self.backend = LayerSplitBackend.open(ModelFiles(model_dir), report.plan, taps=taps)
        [here] = [d for d in report.plan.devices if d.name == "cpu:1"]
        local = type(drafter)(draft_dir, drafter.spec, here, drafter.shapes)
        self.here: LoadedDraft = load_draft(local, report.plan, self.backend)
        self.resources = DraftProcessResources(
            drafter, drafter.program, report.plan, transport, NODE_BYTES
        )
        self.there: LoadedDraft = start_draft(self.resources, drafter, report.plan, self.backend)

    @property
    def process(self):
        return self.there.speculator.drafters[0].passes._process

    @property
    def traffic(self):
        return self.process.life.connection.traffic

    def prefill(self, lane: int, cuts: list[int]) -> None:
        """The prompt, in chunks, to both drafters."""
        self.backend.reset(lane)
        for draft in (self.here, self.there):
            draft.speculator.start(lane)
        for begin, end in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True):
            self.backend.prefill(lane, begin, TOKENS[begin:end], project=False)
            for draft in (self.here, self.there):
                draft.speculator.prefilled(lane, begin, end - begin)

    def close(self) -> None:
        self.there.close()
        self.here.close()
        self.resources.close()
        self.backend.close()


@pytest.fixture(scope="module")
def both(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """One for each way to open it. A test that loses the drafter waits until it is back."""
    opened: dict[str, Both] = {}

    def open_both(transport: str = "shared", **fields) -> Both:
        key = f"{transport} {sorted(fields)}"
        if key not in opened:
            folder = tmp_path_factory.mktemp("both")
            opened[key] = Both(tiny_dir, folder, transport, fields)
        return opened[key]

    yield open_both
    for each in opened.values():
        each.close()


@torch.inference_mode()
def proposed(draft: LoadedDraft, lane: int, shape: RoundShape, end: int = len(TOKENS)) -> list:
    proposal = draft.speculator.drafters[0].passes.propose([7], [lane], [end], shape)
    return [None if t is None else t.tolist() for t in (proposal.tokens, proposal.parents)]


def agree(both: Both, lane: int, end: int = len(TOKENS)) -> None:
    for shape in (CHAIN, TREE, RoundShape(4)):
        assert proposed(both.there, lane, shape, end) == proposed(both.here, lane, shape, end)


@pytest.mark.covered(1)
@pytest.mark.parametrize("fields", [{}, SLIDING, tiny.DFLASH2], ids=["full", "sliding", "dflash2"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_it_proposes_what_one_in_this_process_does(both, transport, fields):
    both = both(transport, **fields)
    both.prefill(0, [])
    both.prefill(1, [1, 40, 64])
    for lane in (0, 1):
        agree(both, lane)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_was_committed_is_what_it_goes_on_from(both, transport):
    both = both(transport)
    both.prefill(0, [])
    both.prefill(2, [100])
    tokens = torch.tensor([[7, 5, 9, 6, 6, 6, 6, 6]] * 2)
    parents = torch.tensor([[-1, 0, 0, 1, 2, 2, 3, 4]] * 2, dtype=torch.int32)
    lanes, begins, paths = [0, 2], [len(TOKENS)] * 2, [[0, 2, 5], [0]]
    both.backend.verify(lanes, begins, tokens, parents)
    both.backend.commit(paths)
    for draft in (both.here, both.there):
        both.backend.send_taps(draft.speculator.drafters[0].passes, lanes, begins, paths, 8)
    agree(both, 0, len(TOKENS) + 3)
    agree(both, 2, len(TOKENS) + 1)


def test_wherever_it_is_no_answer_changes(both, tiny_dir):
    both = both()
    samplings = [Sampling(), Sampling(temperature=0.8), Sampling(repetition_penalty=1.3)]
    tokenizer = Tokenizer.load(tiny_dir)

    def prepared():
        return [prepare(tokenizer, s, seed=i, max_tokens=16) for i, s in enumerate(samplings)]

    plain = plain_answers(both.backend, prepared())
    for shape in both.drafter.shapes:
        found = speculated_answers(both.backend, both.there.speculator, prepared(), shape)
        assert found == plain, shape


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_only_rows_that_the_ring_keeps_go_there(both, transport):
    both = both(transport, **SLIDING)
    row_bytes = both.resources.sizes.row_bytes
    before = both.traffic.payload_bytes_sent
    both.prefill(0, [])
    assert both.traffic.payload_bytes_sent - before == 64 * row_bytes
    before = both.traffic.payload_bytes_sent
    both.backend.verify([0], [len(TOKENS)], torch.tensor([[7, 5, 9, 6, 6, 6, 6, 6]]))
    both.backend.commit([[0, 1, 2]])
    both.backend.send_taps(
        both.there.speculator.drafters[0].passes, [0], [len(TOKENS)], [[0, 1, 2]], 8
    )
    assert both.traffic.payload_bytes_sent - before == 3 * row_bytes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_node_in_memory_moves_no_rows(both, transport):
    both = both(transport)
    both.prefill(0, [])
    features, traffic = both.there.features, both.traffic
    moved = traffic.payload_bytes_sent + traffic.payload_bytes_received
    first, second = features.save(0, 0, 120), features.save(0, 120, len(TOKENS))
    with torch.inference_mode():
        features.restore(
            3, 0, [FeaturePart(first, 0, 120), FeaturePart(second, 0, len(TOKENS) - 120)]
        )
    assert traffic.payload_bytes_sent + traffic.payload_bytes_received == moved
    both.prefill(2, [])
    assert proposed(both.there, 3, TREE) == proposed(both.here, 2, TREE)
    assert features.held(3, 50, len(TOKENS)) == range(50, len(TOKENS))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_go_to_files_and_come_from_there(both, transport):
    both = both(transport)
    both.prefill(0, [])
    ours, theirs = both.here.features, both.there.features
    rows = theirs.export(theirs.save(0, 10, len(TOKENS)))
    assert torch.equal(rows, ours.export(ours.save(0, 10, len(TOKENS))))
    content = theirs.adopt(rows.clone())
    theirs.restore(3, 10, [FeaturePart(content, 0, len(rows))])
    ours.restore(3, 10, [FeaturePart(ours.adopt(rows), 0, len(rows))])
    agree(both, 3)
    theirs.drop(content)


def test_a_memory_that_is_full_is_said_to_be(both):
    both = both("shared")
    both.prefill(0, [])
    held = []
    with pytest.raises(MemoryError):
        while True:
            held.append(both.there.features.save(0, 0, len(TOKENS)))


def kill(both: Both, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(both.process.life.connection._started.child.pid, how)


def until_it_is_back(both: Both) -> None:
    limit = time.monotonic() + 60
    while both.there.speculator.drafters[0].passes.off_reason is not None:
        both.there.speculator.drafters[0].passes.refresh()
        time.sleep(0.05)
        assert time.monotonic() < limit


@pytest.mark.covered(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_that_was_killed_is_left_out_and_started_again(both, transport, may_start):
    both = both(transport)
    both.prefill(0, [])
    features, passes = both.there.features, both.there.speculator.drafters[0].passes
    kept = features.save(0, 0, len(TOKENS))
    may_start.clear()
    kill(both)
    with pytest.raises(DraftFailed, match="SIGKILL"):
        proposed(both.there, 0, CHAIN)
    assert passes.off_reason.startswith("the drafter is gone: drafter on hip:0: ")
    both.prefill(1, [90])  # nothing of it fails
    assert not features.held(1, 0, len(TOKENS))
    assert both.there.speculator.speculation(1).off_reason == passes.off_reason
    assert both.there.speculator.plan([1], alone=True).shape is None
    may_start.set()
    until_it_is_back(both)
    both.prefill(1, [90])
    agree(both, 1)
    # What both map is there still; what was its own is gone with it.
    assert features.is_there(kept) == (transport == "shared")
    if features.is_there(kept):
        features.restore(3, 0, [FeaturePart(kept, 0, len(TOKENS))])
        both.prefill(2, [])
        assert proposed(both.there, 3, CHAIN) == proposed(both.here, 2, CHAIN)
    else:
        assert features.export(kept) is None


@pytest.mark.covered(0)
def test_one_that_hangs_is_given_up(both):
    both = both()
    both.prefill(0, [])
    kill(both, signal.SIGSTOP)  # and gives no sign of life
    began = time.monotonic()
    with pytest.raises(DraftFailed):
        proposed(both.there, 0, CHAIN)
    assert time.monotonic() - began < 30
    until_it_is_back(both)


@pytest.mark.covered(0)
def test_a_proposal_that_never_comes_is_given_up_at_its_deadline(both, monkeypatch):
    both = both()
    both.prefill(0, [])
    connection = both.process.life.connection
    with torch.inference_mode():
        both.there.speculator.drafters[0].passes.propose([7], [0], [len(TOKENS)], CHAIN)
    monkeypatch.setattr(connection._deadlines, "deadline_s", lambda call: 0.3)
    unanswered, send = wire.ResetDraftLane(0, 0), connection._channel.send
    monkeypatch.setattr(connection, "send", lambda *told: send(unanswered, deadline_s=1.0))
    with pytest.raises(DraftFailed, match=r"silent for 0\.3 s"):
        proposed(both.there, 0, CHAIN)
    until_it_is_back(both)


@pytest.mark.covered(0)
def test_one_that_dies_idle_is_noticed(both):
    both = both()
    kill(both)
    both.there.speculator.drafters[0].passes.check_alive()
    assert both.there.speculator.status.off_reason is not None
    until_it_is_back(both)
    assert both.there.speculator.status.off_reason is None


def test_nothing_is_left_of_one_that_is_ended_while_it_starts(both):
    both = both("stream", **SLIDING)
    kill(both)
    both.there.speculator.drafters[0].passes.check_alive()
    both.there.close()
    assert both.process.life is None
    both.there.close()
