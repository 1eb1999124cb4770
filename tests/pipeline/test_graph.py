"""On a GPU: captured passes give what the CPU gives, alone, together and split."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from luceasync.host_cache.nodes import Span
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.precision import Precision
from luceasync.models.trees import ROOT
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.capture import Captured
from luceasync.pipeline.devices import find_devices
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.ranking.logits import NO_TOKEN, RankRequest
from tests import tiny
from tests.pipeline.heard import taps_of

pytestmark = pytest.mark.gpu
PROMPTS = {0: 130, 1: 5, 3: 70}


VERIFY_ROWS = (5, 22)
TAPS = (2, 0)


def load(model_dir: Path, devices: list[str], dtype: str = "fp32", **sizes) -> LayerSplitBackend:
    spec = read_spec(model_dir)
    found = [offer_of("cpu:0", 2**33)] if devices == ["cpu"] else find_devices(devices)
    plan = make_plan(
        spec,
        found,
        precision=Precision.of(dtype),
        weights=[1.0] * len(found),
        prefill_chunk_tokens=None,
        verify_rows=VERIFY_ROWS,
        **{"parallel": 4, "max_ctx_tokens": 512, **sizes},
    )
    return LayerSplitBackend.open(ModelFiles(model_dir), plan, taps=TAPS)


def prompt(lane: int) -> list[int]:
    generator = torch.Generator().manual_seed(lane)
    return torch.randint(3, tiny.VOCAB_SIZE, (PROMPTS[lane],), generator=generator).tolist()


def greedy(backend: LayerSplitBackend, lanes: list[int], num_tokens: int = 32) -> dict[int, list]:
    out: dict[int, list[int]] = {}
    for lane in lanes:
        backend.reset(lane)
        out[lane] = [int(backend.prefill(lane, 0, prompt(lane), project=True).argmax())]
    for step in range(num_tokens - 1):
        positions = [PROMPTS[lane] + step for lane in lanes]
        logits = backend.decode(lanes, positions, [out[lane][-1] for lane in lanes]).whole()
        for lane, token in zip(lanes, logits.argmax(-1).tolist(), strict=True):
            out[lane].append(token)
    return out


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=str)
def test_greedy_tokens_are_those_of_the_cpu(tiny_dir: Path, devices: list[str]):
    expected = greedy(load(tiny_dir, ["cpu"]), [0, 1, 3])
    backend = load(tiny_dir, devices)
    assert greedy(backend, [0, 1, 3]) == expected
    backend.close()


@dataclass
class Seated:
    """A lane that decodes greedily: its last token is the next input."""

    position: int
    tokens: list[int]


def seat(backend: LayerSplitBackend, lane: int, whose: int) -> Seated:
    backend.reset(lane)
    logits = backend.prefill(lane, 0, prompt(whose), project=True)
    return Seated(PROMPTS[whose], [int(logits.argmax())])


def go_on(
    backend: LayerSplitBackend, lanes: dict[int, Seated], num_steps: int, runs_ahead: bool = False
) -> None:
    """Steps as the engine takes them: only the best tokens come to the host.
    `runs_ahead`: the next step is said to be likely, and now and then has ended by then.
    """
    for step in range(num_steps):
        positions = [each.position for each in lanes.values()]
        logits = backend.decode([*lanes], positions, [each.tokens[-1] for each in lanes.values()])
        ranking = logits.rank(RankRequest())
        if runs_ahead:
            backend.run_ahead()
        if step % 2:
            torch.cuda.synchronize()
        best = ranking.candidates().best.tolist()
        assert runs_ahead or best == logits.whole().argmax(-1).tolist()
        for each, token in zip(lanes.values(), best, strict=True):
            each.position += 1
            each.tokens.append(token)


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cpu"]], ids=str)
def test_tokens_that_a_step_leaves_for_the_next_one_are_those_of_the_cpu(
    tiny_dir: Path, devices: list[str], runs_ahead: bool
):
    expected = greedy(load(tiny_dir, ["cpu"]), [0, 1, 3], 80)
    backend = load(tiny_dir, devices)
    lanes = {lane: seat(backend, lane, lane) for lane in (0, 1, 3)}
    go_on(backend, lanes, 79, runs_ahead)
    assert {lane: each.tokens for lane, each in lanes.items()} == expected
    backend.close()


def go_astray(backend: LayerSplitBackend, runs_ahead: bool) -> list[list[int]]:
    """Greedy steps, and between them everything that invalidates what a step has left."""
    lanes = {lane: seat(backend, lane, lane) for lane in (0, 1, 3)}
    go_on(backend, lanes, 4, runs_ahead)
    go_on(backend, {0: lanes[0]}, 3, runs_ahead)  # a step of another size
    go_on(backend, lanes, 3, runs_ahead)
    go_on(backend, {3: lanes[3], 0: lanes[0]}, 2, runs_ahead)
    go_on(backend, lanes, 2, runs_ahead)
    for paths in ([[0, 1], [0]], [[], []]):  # rounds
        speculating = [lanes[0], lanes[3]]
        rows = torch.tensor([[each.tokens[-1], 7, 8, 9, 10] for each in speculating])
        backend.verify([0, 3], [each.position for each in speculating], rows)
        backend.commit(paths)
        for each, path in zip(speculating, paths, strict=True):
            each.position += len(path)
            each.tokens += [7, 11][: len(path)]
        go_on(backend, lanes, 2, runs_ahead)
    lanes[1].tokens[-1] = 12  # another token than the best one
    go_on(backend, lanes, 2, runs_ahead)
    lanes[0].position -= 1  # the same position again
    go_on(backend, lanes, 2, runs_ahead)
    for each in lanes.values():
        each.position -= 1
    go_on(backend, lanes, 2, runs_ahead)
    others = {**lanes, 1: seat(backend, 1, 3)}  # a lane is given to another prompt
    go_on(backend, others, 3, runs_ahead)
    return [each.tokens for each in (*lanes.values(), others[1])]


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_whatever_comes_between_greedy_steps_the_tokens_are_those_of_the_cpu(
    tiny_dir: Path, runs_ahead: bool
):
    expected = go_astray(load(tiny_dir, ["cpu"]), runs_ahead=False)
    backend = load(tiny_dir, ["cuda:0"])
    assert go_astray(backend, runs_ahead) == expected
    backend.close()


@pytest.mark.parametrize("lanes", [[1], [0, 1, 3]], ids=len)
def test_a_step_that_has_run_ahead_is_launched_once(
    tiny_dir: Path, lanes: list[int], monkeypatch: pytest.MonkeyPatch
):
    backend = load(tiny_dir, ["cuda:0"])
    seated = {lane: seat(backend, lane, lane) for lane in lanes}
    launched, replay = [], Captured.replay

    def heard(self: Captured) -> None:
        launched.append(self)
        replay(self)

    monkeypatch.setattr(Captured, "replay", heard)
    go_on(backend, seated, 9, runs_ahead=True)
    assert len(launched) == (9 if read_spec(tiny_dir).has_end_state else 10)
    backend.close()


def test_a_row_without_numbers_may_run_ahead_and_the_others_go_on(tiny_dir: Path):
    backend = load(tiny_dir, ["cuda:0"])
    expected = seat(backend, 1, 1)
    go_on(backend, {1: expected}, 6)
    sick, well = seat(backend, 0, 0), seat(backend, 1, 1)
    [shard] = backend._stages[0]._shards
    with torch.inference_mode():
        for stack in shard.cache.row_stacks:
            stack[:, 0] = float("nan")
    logits = backend.decode([0, 1], [sick.position, well.position], [5, well.tokens[-1]])
    ranking = logits.rank(RankRequest())
    backend.run_ahead()
    best = ranking.candidates().best.tolist()
    torch.cuda.synchronize()
    assert best == [NO_TOKEN, expected.tokens[1]]
    well.position += 1
    well.tokens.append(best[1])
    go_on(backend, {1: well}, 5, runs_ahead=True)
    assert well.tokens == expected.tokens
    backend.close()


@pytest.mark.parametrize("lanes", [[1], [0, 1, 3]], ids=len)
def test_a_greedy_step_after_another_copies_nothing_to_the_gpu(
    tiny_dir: Path, lanes: list[int], monkeypatch: pytest.MonkeyPatch
):
    backend = load(tiny_dir, ["cuda:0"])
    seated = {lane: seat(backend, lane, lane) for lane in lanes}
    copied, copy = [], torch.Tensor.copy_

    def heard(self: torch.Tensor, *args, **options) -> torch.Tensor:
        if self.is_cuda:
            copied.append(self.shape)
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", heard)
    go_on(backend, seated, 1)
    assert len(copied) == 1
    go_on(backend, seated, 9)
    assert len(copied) == 1
    backend.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("peer_access", ["auto", "off"])
def test_two_gpus_give_the_bits_of_one(tiny_dir: Path, peer_access: str):
    spec = read_spec(tiny_dir)
    logits = []
    for names in (["cuda:0"], ["cuda:0", "cuda:1"]):
        plan = make_plan(
            spec,
            find_devices(names),
            precision=Precision.of("fp32"),
            weights=[1.0] * len(names),
            parallel=2,
            max_ctx_tokens=512,
            prefill_chunk_tokens=64,
            peer_access=peer_access,
        )
        backend = LayerSplitBackend.open(ModelFiles(tiny_dir), plan)
        seen = [
            backend.prefill(0, at, prompt(0)[at : at + 64], project=True).clone()
            for at in (0, 64, 128)
        ]
        seen += [backend.decode([0], [130 + i], [i + 5]).whole()[0].clone() for i in range(8)]
        logits.append(torch.stack([x.cpu() for x in seen]))
        backend.close()
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_rows_logits_do_not_depend_on_the_rows_beside_it(tiny_dir: Path, dtype: str):
    backend = load(tiny_dir, ["cuda:0"], dtype)
    for lane in PROMPTS:
        backend.prefill(lane, 0, prompt(lane), project=False)
    together = backend.decode([0, 1, 3], [130, 5, 70], [7, 8, 9]).whole()[1].clone()
    backend.reset(1)
    backend.prefill(1, 0, prompt(1), project=False)
    assert torch.equal(backend.decode([1], [5], [8]).whole()[0], together)
    backend.close()


def test_lives_leave_no_memory_behind(tiny_dir: Path):
    held = []
    for _ in range(6):
        backend = load(tiny_dir, ["cuda:0"])
        greedy(backend, [0], 4)
        backend.close()
        del backend
        gc.collect()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] == held[1]


def random_tree(num_rows: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [ROOT, *(choose.randrange(row) for row in range(1, num_rows))]


def path_to(parents: list[int], row: int) -> list[int]:
    path = [row]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path[::-1]


def speculate(backend: LayerSplitBackend, lanes: list[int], num_rows: int) -> list[torch.Tensor]:
    """Three rounds of verify and commit, the last lane keeping nothing, then a decode step: all
    logits and taps.
    """
    at, found = [PROMPTS[lane] for lane in lanes], []
    for lane in lanes:
        backend.reset(lane)
        backend.prefill(lane, 0, prompt(lane), project=False)
    for turn in range(3):
        trees = [random_tree(num_rows, lane + 10 * turn) for lane in lanes]
        generator = torch.Generator().manual_seed(turn)
        tokens = torch.randint(3, tiny.VOCAB_SIZE, (len(lanes), num_rows), generator=generator)
        logits = backend.verify(lanes, at, tokens, torch.tensor(trees, dtype=torch.int32)).whole()
        found += [x.cpu().clone() for x in (logits, *taps_of(backend))]
        paths = [path_to(tree, num_rows - 1 - turn) for tree in trees[:-1]] + [[]]
        backend.commit(paths)
        at = [begin + len(path) for begin, path in zip(at, paths, strict=True)]
    logits = backend.decode(lanes, at, [9] * len(lanes)).whole()
    return found + [x.cpu().clone() for x in (logits, *taps_of(backend))]


def in_chunks(backend: LayerSplitBackend, sizes: list[int]) -> list[torch.Tensor]:
    """Logits and taps of each chunk of a prompt, then of a decode step."""
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(3, tiny.VOCAB_SIZE, (sum(sizes),), generator=generator).tolist()
    begin, found = 0, []
    for size in sizes:
        logits = backend.prefill(2, begin, tokens[begin : begin + size], project=True)
        found += [logits.cpu().clone(), *(x[:, :size].cpu().clone() for x in taps_of(backend))]
        begin += size
    return [*found, backend.decode([2], [begin], [7]).whole()[0].cpu().clone()]


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=str)
@pytest.mark.parametrize("sizes", [[1], [16, 17], [64, 15, 5], [70, 1, 63, 2]], ids=str)
def test_short_chunks_are_those_of_the_cpu(tiny_dir: Path, devices: list[str], sizes: list[int]):
    expected = in_chunks(load(tiny_dir, ["cpu"]), sizes)
    backend = load(tiny_dir, devices)
    for found, truth in zip(in_chunks(backend, sizes), expected, strict=True):
        assert found.shape == truth.shape and (found - truth).abs().max() < 1e-4
    backend.close()


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=str)
@pytest.mark.parametrize(("mark", "num_tokens"), [(9, 14), (14, 15), (64, 70), (123, 130)])
def test_the_state_within_a_chunk_is_that_of_the_cpu(
    tiny_dir: Path, devices: list[str], mark: int, num_tokens: int
):
    found = []
    for names in (["cpu"], devices):
        backend = load(tiny_dir, names)
        logits = backend.prefill(0, 0, prompt(0)[:num_tokens], project=True, mark=mark)
        found.append([logits.cpu().clone(), *(x[:, :num_tokens].cpu() for x in taps_of(backend))])
        backend.nodes.save(0, "n", Span(0, mark, with_state=True))
        backend.decode([0], [num_tokens], [5])
        backend.nodes.restore(1, ["n"], mark)
        found[-1].append(backend.decode([1], [mark], [7]).whole()[0].cpu().clone())
        backend.close()
    for ours, truth in zip(found[1], found[0], strict=True):
        assert ours.shape == truth.shape and (ours - truth).abs().max() < 1e-4


def test_a_short_chunk_that_nobody_asks_gives_no_logits(tiny_dir: Path):
    backend = load(tiny_dir, ["cuda:0"])
    assert backend.prefill(0, 0, [5, 6, 7], project=False) is None
    backend.close()


@pytest.mark.parametrize("devices", [["cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]], ids=str)
@pytest.mark.parametrize("lanes", [[1], [0, 1, 3]], ids=len)
@pytest.mark.parametrize("num_rows", VERIFY_ROWS)
def test_verify_and_commit_are_those_of_the_cpu(
    tiny_dir: Path, devices: list[str], lanes: list[int], num_rows: int
):
    expected = speculate(load(tiny_dir, ["cpu"]), lanes, num_rows)
    backend = load(tiny_dir, devices)
    for found, truth in zip(speculate(backend, lanes, num_rows), expected, strict=True):
        assert found.shape == truth.shape and (found - truth).abs().max() < 1e-4
    backend.close()


def test_a_chain_is_one_again_after_a_tree(tiny_dir: Path):
    tokens = torch.tensor([prompt(3)[:5]])
    found = []
    for trees in ([], [random_tree(5, 3)]):
        backend = load(tiny_dir, ["cuda:0"])
        backend.prefill(0, 0, prompt(0), project=False)
        for tree in trees:
            backend.verify([0], [130], tokens, torch.tensor([tree], dtype=torch.int32))
            backend.commit([[]])
        found.append(backend.verify([0], [130], tokens).whole().clone())
        backend.close()
    assert torch.equal(*found)


def test_in_bf16_a_verified_row_is_close_to_a_decoded_one(tiny_dir: Path):
    backend = load(tiny_dir, ["cuda:0"], "bf16")
    backend.prefill(0, 0, prompt(0), project=False)
    tokens = prompt(3)[:5]
    verified = backend.verify([0], [130], torch.tensor([tokens], device="cuda")).whole()[0].clone()
    decoded = [backend.decode([0], [130 + i], [t]).whole()[0].clone() for i, t in enumerate(tokens)]
    assert (verified - torch.stack(decoded)).norm() / verified.norm() < 2e-2
    backend.close()
