"""Copies of rows between pages and host memory, and their order, on any device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.host_cache.copies import HostRows, PageRows
from luceasync.host_cache.copy_stream import DoneTicket
from luceasync.host_cache.gpu_copies import PageCopies, made_on_use
from luceasync.kv.cache import LaneCache, total_bytes
from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.delta import DeltaSpec
from luceasync.pipeline.platform import open_platform

SPEC = AttentionSpec(2, 1, 4, 4, 1e4, gated=False)
KINDS = (SPEC, DeltaSpec(1, 1, 3, 5, 4), SPEC)
LANE, NUM_PAGES = 1, 4
RUNS, ROWS_AT = [range(128, 192), range(3, 5), range(64, 128)], [0, 66, 70]

DEVICES = ["cpu:0", pytest.param("cuda:0", marks=pytest.mark.gpu)]


class Late(DoneTicket):
    """A save that is waited for."""

    def __init__(self) -> None:
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1

    def precede(self, stream: torch.cuda.Stream) -> None:
        self.num_waits += 1


class Copies:
    """A cache full of noise, and its copies. What a stream copies comes late."""

    def __init__(self, device: str) -> None:
        self.platform = open_platform(device)
        self.cache = LaneCache(
            KINDS,
            num_lanes=2,
            num_pages=NUM_PAGES,
            dtype_of=lambda role: torch.float32,
            device=self.platform.device,
        )
        for stack in [*self.cache.row_stacks, *self.cache.state_stacks]:
            stack.copy_(torch.randn(stack.shape))
        self.copies = self.platform.copies(self.cache)
        self.on_gpu = device.startswith("cuda")

    def hold_up(self) -> None:
        """The streams of pages stand still for a while."""
        if self.on_gpu:
            for stream in (self.copies._pages_in, self.copies._pages_out):
                with torch.cuda.stream(stream._stream):
                    torch.cuda._sleep(100_000_000)

    def region(self, num_bytes: int) -> memoryview:
        return memoryview(torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self.on_gpu).numpy())

    def rows(self) -> list[Tensor]:
        """The lane's rows [places, ...] of every layer, on the host."""
        return [layer[LANE].cpu().clone() for stack in self.cache.row_stacks for layer in stack]


@pytest.fixture(params=DEVICES)
def copies(request: pytest.FixtureRequest):
    made = Copies(request.param)
    yield made
    made.copies.close()


def test_rows_of_a_span_are_saved_from_pages_anywhere(copies):
    """Rows of absent chunks are filled in by AbsentRows."""
    num_rows = 140
    shapes = copies.cache.row_shapes(num_rows)
    region = copies.region(total_bytes(shapes.values()))
    before = copies.rows()
    copies.hold_up()
    ticket = copies.copies.save(LANE, RUNS, region, None, LANE, ROWS_AT)
    copies.copies.freed(LANE)
    for stack in copies.cache.row_stacks:
        stack.fill_(torch.nan)  # the next owner of the pages, in the order of the passes
    ticket.wait()
    parts = torch.frombuffer(region, dtype=torch.float32).view(len(before), num_rows, 1, 4)
    for found, rows in zip(parts, before, strict=True):
        expected = torch.zeros(num_rows, 1, 4)
        for run, at in zip(RUNS, ROWS_AT, strict=True):
            expected[at : at + len(run)] = rows[run.start : run.stop]
        assert found.equal(expected)


def test_state_comes_with_rows_of_which_some_are_absent(copies):
    shapes, ends = copies.cache.row_shapes(140), copies.cache.state_shapes()
    region, state = (copies.region(total_bytes(of.values())) for of in (shapes, ends))
    expected = [stack[:, LANE].cpu().clone() for stack in copies.cache.state_stacks]
    copies.copies.save(LANE, RUNS, region, state, LANE, ROWS_AT).wait()
    flat = torch.cat([tensor.view(-1) for tensor in expected])
    assert torch.frombuffer(state, dtype=torch.float32).equal(flat)
    assert torch.frombuffer(region, dtype=torch.float32).any()


def test_what_is_listed_after_it_was_paged_in_is_there(copies):
    late = Late()
    shapes = copies.cache.row_shapes(100)
    tensors = {key: torch.randn(shape) for key, (shape, _) in shapes.items()}
    if copies.on_gpu:
        tensors = {key: tensor.pin_memory() for key, tensor in tensors.items()}
    rows = [
        PageRows(HostRows(20, 60, 20, tensors, late), 64),
        PageRows(HostRows(60, 64, 60, tensors, late), 200),
    ]
    before = copies.rows()
    copies.hold_up()
    copies.copies.page_in(LANE, rows)
    copies.copies.listed(LANE)
    after = copies.rows()  # queued behind them; not waited for by anybody else
    assert late.num_waits
    for key, found, old in zip(shapes, after, before, strict=True):
        expected = old.clone()
        expected[64:104] = tensors[key][20:60]
        expected[200:204] = tensors[key][60:64]
        assert found.equal(expected)


def test_a_lane_that_begins_anew_comes_after_what_was_paged_in(copies):
    """Its pages were reserved for chunks that are no longer wanted."""
    shapes = copies.cache.row_shapes(64)
    tensors = {key: torch.full(shape, torch.nan) for key, (shape, _) in shapes.items()}
    if copies.on_gpu:
        tensors = {key: tensor.pin_memory() for key, tensor in tensors.items()}
    copies.hold_up()
    copies.copies.page_in(LANE, [PageRows(HostRows(0, 64, 0, tensors, None), 0)])
    copies.copies.rewrite(LANE)
    copies.copies.use([LANE])
    for stack in copies.cache.row_stacks:
        stack[:, LANE] = 1.0
    assert all((rows == 1).all() for rows in copies.rows())


def test_saves_of_short_runs_are_those_of_one(copies):
    """Of places that lie apart, without a row left out."""
    runs = [range(page * 64, page * 64 + 64) for page in (2, 0, 3)]
    shapes = copies.cache.row_shapes(192)
    region = copies.region(total_bytes(shapes.values()))
    copies.copies.save(LANE, runs, region, None, LANE).wait()
    parts = torch.frombuffer(region, dtype=torch.float32).view(-1, 192, 1, 4)
    for found, rows in zip(parts, copies.rows(), strict=True):
        assert found.equal(torch.cat([rows[run.start : run.stop] for run in runs]))


def test_page_copies_are_made_once_and_not_before_they_are_needed() -> None:
    calls: list[str] = []

    def make() -> PageCopies:
        calls.append("made")
        return PageCopies(
            gather=lambda cache, lane, rows: calls.append(f"gather {lane}"),
            scatter=lambda cache, lane, rows: calls.append(f"scatter {lane}"),
            rehearse=lambda cache: calls.append("rehearse"),
        )

    late = made_on_use(make)
    assert calls == []
    late.gather(None, 1, [])
    late.scatter(None, 2, [])
    late.rehearse(None)
    assert calls == ["made", "gather 1", "scatter 2", "rehearse"]
