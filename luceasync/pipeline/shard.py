"""Layers [begin, end) on one device: weights, lanes' state, and forward passes.

The first shard also embeds tokens, the last one projects to logits. Does not know other shards or
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from itertools import compress

import torch
from torch import Tensor

from luceasync.host_cache.arena import HostMemory
from luceasync.host_cache.nodes import NodeStore
from luceasync.host_cache.shard_nodes import ShardContents
from luceasync.kv.cache import LaneCache
from luceasync.kv.pages import CHUNK_TOKENS, PageEvent, num_chunks
from luceasync.models.encodings import WeightPlacement
from luceasync.models.ends import ModelEnds
from luceasync.models.families import family_of
from luceasync.models.loader import TensorReader, TensorSource
from luceasync.models.mixers.mixer import Mixer, MixerBody, State
from luceasync.models.pass_rows import NO_LANE, PADDING_ENTRY, AcceptedRows, Entry, Paths, Rows
from luceasync.models.precision import torch_dtype
from luceasync.models.recent import RecentRows
from luceasync.models.scratch import VerifyScratch
from luceasync.models.spec import LayerSpec, ModelSpec
from luceasync.models.trees import Trees
from luceasync.pipeline.passes import Batch
from luceasync.pipeline.past_rows import PastOfLanes, PastRows
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import Platform
from luceasync.pipeline.shard_plan import ShardPlan


class Shard:
    """One shard. Synchronous; used from the engine thread only."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        shard: ShardPlan,
        platform: Platform,
        source: TensorSource,
        advance: Callable[[int], None],
        memory: HostMemory,
        tapped: Sequence[int] = (),
    ) -> None:
        """Read the shard's weights and allocate its state. The rows after each layer in `tapped`
        are kept in `taps`. Raises ModelError."""
        self.plan = shard
        self.platform = platform
        self.device = platform.device
        self._spec = spec
        precision = plan.precision
        slotted = platform.slotted_ops(shard.expert_slots) if shard.expert_slots else None
        self._ops = slotted or platform.ops
        self.layers = range(shard.begin, shard.end)
        family, layers = family_of(spec), self.layers
        # Lanes and passes take memory once the weights are read: until then, layers in transit do.
        room_bytes = plan.device_bytes(shard) + shard.workspace_bytes - shard.weight_bytes
        num_at_once = min(platform.num_layers_at_once(room_bytes), len(layers))
        with ExitStack() as closing_all:
            # Layers whose experts share slots are read one by one.
            places = [
                WeightPlacement(
                    self._ops,
                    self.device,
                    torch_dtype(precision.weights),
                    closing_all.enter_context(closing(platform.row_transfer())),
                )
                for _ in range(1 if slotted else num_at_once)
            ]
            reader, read = TensorReader(source, spec, places[0], advance), family.read_layer
            if len(places) == 1:
                self._layers = [read(reader, layer) for layer in layers]
            else:
                on_device = platform.on_device
                self._layers = reader.layers_in_threads(layers, read, places, on_device)
            self.ends = family.read_ends(reader, is_first=shard.is_first, is_last=shard.is_last)
            for place in places:
                place.findings.raise_fault()
        following = [*(layer.mixer.norm for layer in self._layers[1:]), self.ends.norm]
        for layer, norm in zip(self._layers, following, strict=True):
            layer.link(norm)
        if slotted is not None:
            slotted.allocate()
        self._are_run = [True] * len(self.layers)  # which layers a pass runs
        mixers = self._mixers = spec.mixers[shard.begin : shard.end]
        self._bodies: dict[Mixer, MixerBody] = {
            mixer: self._ops.pick(mixer.torch_body, mixer.triton_body, mixer.compiled_body)
            for mixer in mixers
        }
        self._slotted = slotted
        self.cache = LaneCache(
            mixers,
            first_layer=shard.begin,
            num_lanes=plan.parallel,
            num_pages=plan.num_pages,
            dtype_of=precision.torch_dtype,
            device=self.device,
            blank=platform.blank,
        )
        platform.touch(self.cache.touch)
        probes = plan.pool is not None and plan.pool.policy == "qk"
        self.scratch = VerifyScratch(
            mixers,
            num_rows=plan.num_scratch_rows(shard),
            precision=precision,
            device=self.device,
            with_recent=probes,
        )
        self._recent: RecentRows | None = None
        if probes:
            self._recent = RecentRows(
                mixers, num_lanes=plan.parallel, precision=precision, device=self.device
            )
        self._tapped = frozenset(tapped)
        self.taps: dict[int, Tensor] = {}  # of the last pass, by layer: [entries, rows, hidden]
        self.copies = platform.copies(self.cache)
        number = plan.shards.index(shard)
        contents = ShardContents(self.cache, number, memory, self.copies)
        self.absent = contents.absent
        self.nodes = NodeStore(contents)
        self.past: PastOfLanes | None = None  # set where lanes may exceed their pages
        if plan.pool is not None:
            self.copies.rehearse()
            self.past = PastOfLanes(
                mixers, shard.begin, self.cache, platform, self.absent, self._recent
            )

    def expert_counts(self) -> dict[str, int]:
        """Counts of experts in all passes so far, by how they were found, and bytes copied; empty
        if all are on the device. May be called from any thread."""
        return {} if self._slotted is None else self._slotted.counts()

    def on_device(self) -> AbstractContextManager[object]:
        """Context in which kernels are launched on this shard's device."""
        return self.platform.on_device()

    def rows(self, batch: Batch) -> Rows:
        """The batch as Rows on this device; its pages must be placed."""
        entries = tuple(
            self._entry(lane, begin, batch.num_rows)
            for lane, begin in zip(batch.lanes, batch.begins, strict=True)
        )
        positions = torch.tensor(batch.begins, dtype=torch.int32)[:, None]
        positions = (positions + torch.arange(batch.num_rows, dtype=torch.int32)).to(self.device)
        lanes = torch.tensor(batch.lanes, dtype=torch.int32).to(self.device)
        return self.rows_from(entries, lanes, positions, batch.mark)

    def rows_from(
        self,
        entries: tuple[Entry, ...],
        lanes: Tensor,
        positions: Tensor,
        mark: int | None = None,
    ) -> Rows:
        """Rows from tensors that are on this device."""
        prepared = {mixer: body.prepare(positions) for mixer, body in self._bodies.items()}
        row_indices = self._ops.row_indices(positions, lanes, self.cache.absent)
        return Rows(entries, lanes, row_indices, self.cache.tables, prepared, mark)

    def forward(self, x: Tensor, rows: Rows, past: PastRows | None = None) -> Tensor:
        """Run the layers. x: [entries, rows, hidden] on this device. State is updated in place."""
        self.taps = {}
        of_layers = zip(self.layers, self._mixers, self._layers, self._states(), strict=True)
        for index, mixer, layer, state in compress(of_layers, self._are_run):
            seen = rows if past is None else replace(rows, past=past.of(index, mixer))
            x = layer.forward(x, state, seen)
            self._tap(index, x)
        return x

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within the context, passes run few layers of each kind, enough to compile the kernels of
        all. Kernels also depend on where tensors begin: adjacent layers and the last one differ
        most."""
        kinds: dict[tuple[LayerSpec, int], list[int]] = {}
        for number, (index, layer) in enumerate(zip(self.layers, self._layers, strict=True)):
            # Layers of one spec whose tensors are stored differently are not equally large.
            kinds.setdefault((self._spec.layers[index], layer.num_bytes), []).append(number)
        chosen = {number for alike in kinds.values() for number in (*alike[:2], alike[-1])}
        self._are_run = [number in chosen for number in range(len(self.layers))]
        try:
            yield
        finally:
            self._are_run = [True] * len(self.layers)

    def note_mark(self, batch: Batch) -> None:
        """A prefill chunk has run: record the state that was set aside at its mark."""
        if batch.mark is not None:
            (lane,), (begin,) = batch.lanes, batch.begins
            self.cache.note_end_aside(lane, begin + batch.mark, begin + batch.num_rows)

    def tree_rows(self, batch: Batch, depths: Tensor) -> Rows:
        """Rows of a verify pass: `depths` int32 [entries, rows] below each lane's committed end."""
        entries = tuple(
            self._committed(lane, begin)
            for lane, begin in zip(batch.lanes, batch.begins, strict=True)
        )
        begins = torch.tensor(batch.begins, dtype=torch.int32).to(self.device)
        lanes = torch.tensor(batch.lanes, dtype=torch.int32).to(self.device)
        return self.rows_from(entries, lanes, begins[:, None] + depths)

    def trees(self, parents: Tensor) -> Trees:
        """parents: int32 [entries, rows] on this device; see luceasync.models.trees."""
        return self._ops.trees(parents, self._spec.reach)

    def verify(self, x: Tensor, rows: Rows, trees: Trees) -> Tensor:
        """Run the layers over trees of rows, writing only scratch; `commit` then takes paths. x:
        [entries, rows, hidden] on this device.
        """
        self.taps = {}
        scratch = self.scratch.shaped(*x.shape[:2])
        of_layers = zip(self.layers, self._layers, self._states(), scratch.layers, strict=True)
        for index, layer, state, kept in compress(of_layers, self._are_run):
            x = layer.verify(x, state, rows, trees, kept)
            self._tap(index, x)
        return x

    def paths(self, batch: Batch, paths: Sequence[Sequence[int]]) -> Paths:
        """The accepted rows of each entry of the verify pass `batch`, by their paths. Their pages
        must be placed.
        """
        kept = []
        for i, (lane, begin, path) in enumerate(zip(batch.lanes, batch.begins, paths, strict=True)):
            if path:
                first = self.cache.row_index(lane, begin)
                places = self.cache.places(lane, first, first + len(path))
                rows = torch.tensor(path, device=self.device)
                kept.append(AcceptedRows(i, lane, first, begin, places, rows))
        counts = [len(path) for path in paths]
        filled = [[*path, *[0] * (batch.num_rows - len(path))] for path in paths]
        numbers = (batch.lanes, batch.begins, filled, counts)
        lanes, positions, chosen, lengths = (
            torch.tensor(n, dtype=torch.int32).to(self.device) for n in numbers
        )
        return self.paths_from(tuple(kept), lanes, positions, chosen, lengths)

    def paths_from(
        self,
        kept: tuple[AcceptedRows, ...],
        lanes: Tensor,
        positions: Tensor,
        rows: Tensor,
        counts: Tensor,
    ) -> Paths:
        """Paths from tensors that are on this device; `positions`: of each entry's first row."""
        row_indices = self._ops.row_indices(positions[:, None], lanes, self.cache.absent)[:, 0]
        return Paths(kept, lanes, row_indices, positions, rows, counts, self.cache.tables)

    def commit(self, paths: Paths) -> None:
        """Make the rows of `paths` of the last `verify` the next tokens of their lanes."""
        for mixer, scratch in self.scratch.shaped(*paths.rows.shape).stacked.items():
            if not scratch:
                continue  # it has no rows itself
            recent = () if self._recent is None else self._recent.stacked[mixer]
            self._bodies[mixer].commit(scratch, (*self.cache.stacked[mixer], *recent), paths)

    def place(self, events: Sequence[PageEvent]) -> None:
        """Apply events of the page map."""
        if self.past is not None:
            self.past.before_events(events)
        self.cache.place(events)
        for lane in {event.lane for event in events}:
            self.absent.placed(lane)

    def use(self, lanes: Sequence[int]) -> None:
        """Order the next pass after the lanes' restores, and after saves of what the lanes held
        before their reset."""
        self.copies.use(lanes)
        self.absent.use(lanes)
        self.cache.begin_pass()

    def reset(self, lane: int) -> None:
        """Empty the lane. Saves in progress continue."""
        self.copies.rewrite(lane)
        self.cache.reset(lane)
        self.absent.reset(lane)
        if self.past is not None:
            self.past.reset(lane)

    def close(self) -> None:
        """Free weights and state. May be called twice."""
        self._layers.clear()
        self.ends = ModelEnds(None, None, None)
        self.taps = {}
        self.scratch.close()
        if self.past is not None:
            self.past.close()
        if self._recent is not None:
            self._recent.close()
        self.nodes.close()
        self.cache.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and state."""
        weights = sum(layer.num_bytes for layer in self._layers) + self.ends.num_bytes
        recent = 0 if self._recent is None else self._recent.num_bytes
        return weights + self.cache.num_bytes + self.scratch.num_bytes + recent

    def _states(self) -> Iterator[State]:
        """State of each layer, with its ring of newest rows if there are rings."""
        if self._recent is None:
            return iter(self.cache.layers)
        both = zip(self.cache.layers, self._recent.layers, strict=True)
        return ((*state, *recent) for state, recent in both)

    def _tap(self, layer: int, x: Tensor) -> None:
        if layer in self._tapped:
            self.taps[layer] = x.clone()  # the next layer may overwrite it

    def _committed(self, lane: int, num_tokens: int) -> Entry:
        """An entry without new rows that reads the lane's committed chunks, whole."""
        if lane == NO_LANE:
            return PADDING_ENTRY
        end = self.cache.row_index(lane, num_tokens)
        read = self.cache.places(lane, 0, num_chunks(end) * CHUNK_TOKENS)
        return Entry(lane, end, end, slice(0, 0), read)

    def _entry(self, lane: int, begin: int, num_rows: int) -> Entry:
        if lane == NO_LANE:
            return PADDING_ENTRY
        first = self.cache.row_index(lane, begin)
        end = first + num_rows
        places = self.cache.places
        # A decode step reads whole chunks, so that few shapes occur: see
        # attention_torch.attend_one.
        read_end = end if num_rows > 1 else num_chunks(end) * CHUNK_TOKENS
        return Entry(lane, first, end, places(lane, first, end), places(lane, 0, read_end))
