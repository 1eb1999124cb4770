"""A target whose keys and values are the tokens themselves, and a disk that carries out orders on
demand: what is restored wrongly gives wrong answers, and what is not held cannot be restored.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from luceasync.disk_cache.codec import END_PARTS, Half, NodePart, part_of
from luceasync.disk_cache.outcomes import Miss
from luceasync.errors import SnapshotMismatch
from luceasync.host_cache.arena import Holes
from luceasync.host_cache.copy_stream import DoneTicket, Ticket
from luceasync.host_cache.nodes import NodeSizes, Span
from luceasync.kv.cache import Shape
from luceasync.models.mixers import END_KINDS
from luceasync.nodes import MissReason
from luceasync.prefix_cache.cache import PrefixCache
from luceasync.prefix_cache.disk_orders import (
    FetchedNode,
    FindOrder,
    HalfNode,
    ReadOrder,
    WriteReport,
)
from luceasync.prefix_cache.index import Limits
from luceasync.prefix_cache.lease import Lease, chunk_end
from luceasync.prefix_cache.memory import MemoryNodes, UnreadFeatures
from luceasync.prefix_cache.tenants import NO_TENANT
from luceasync.prefix_tree.node import NOWHERE, Node
from luceasync.ranking.local import LocalLogits
from luceasync.request import Request, TokenPrompt
from tests.host_cache.late import LateTicket
from tests.prompts import lease_of
from tests.whole_lanes import PagelessLanes

VOCAB_SIZE = 8
TOKEN_BYTES, STATE_BYTES = 4, 8
MEMORY, DISK = frozenset({"memory"}), frozenset({"disk"})
CHUNK = 64
GONE = Miss(MissReason.GONE, "no such file")
FAULT = Miss(MissReason.IO_ERROR, "the disk is slow")


def digest(tokens: Sequence[int]) -> int:
    """What a recurrent state would hold of the tokens."""
    return zlib.crc32(array("i", tokens).tobytes())


def following(tokens: Sequence[int]) -> int:
    """The token that the model says next; it depends on each one before."""
    return digest(tokens) % VOCAB_SIZE


class TokenTarget:
    """Lanes that hold tokens, and nodes that hold spans of them. Refuses what a real one could not
    do. `late`: copies of these verbs do not arrive yet; `is_full`: there is no memory; `is_sick`:
    it computes NaN; `memory`: what is free of it, in which a node wants one piece.
    """

    sizes = NodeSizes(TOKEN_BYTES, STATE_BYTES)
    sets_ends_aside = True

    def __init__(self, num_lanes: int, *, recurrent: bool) -> None:
        self.lanes: list[list[int]] = [[] for _ in range(num_lanes)]
        self.nodes: dict[str, tuple[Span, list[int], int | None]] = {}
        self.recurrent = recurrent
        self.num_run = 0
        self.is_full = self.is_sick = False
        self.late: tuple[str, ...] = ()
        self._tickets: list[LateTicket] = []
        self.memory: Holes | None = None
        self._mark: tuple[int, int] | None = None  # of the last pass: lane, position
        self._places: dict[str, tuple[int, int]] = {}

    def prefill(
        self,
        lane: int,
        begin: int,
        tokens: Sequence[int],
        *,
        project: bool,
        mark: int | None = None,
        scores: bool = False,
    ) -> Tensor | None:
        assert len(self.lanes[lane]) == begin
        assert mark is None or (self.recurrent and begin < mark < begin + len(tokens))
        self._mark = None if mark is None else (lane, mark)
        self.lanes[lane].extend(tokens)
        self.num_run += len(tokens)
        return self._logits([lane])[0] if project else None

    def decode(self, lanes: Sequence[int], positions: Sequence[int], tokens: Sequence[int]):
        self._mark = None
        for lane, position, token in zip(lanes, positions, tokens, strict=True):
            assert len(self.lanes[lane]) == position
            self.lanes[lane].append(token)
        return LocalLogits(self._logits(lanes))

    def run_ahead(self) -> None:
        """A token would be in the lane before it is known."""

    def reset(self, lane: int) -> None:
        self.lanes[lane] = []

    def arrive(self) -> None:
        """All copies arrive, and those to come do so at once."""
        self.late = ()
        while self._tickets:
            self._tickets.pop(0).arrive()

    def save(self, lane: int, node: str, span: Span) -> Ticket:
        if self.is_full or not self._take(node, sum(self.sizes.of(span))):
            self.drop(node)  # as a backend of several groups does
            raise MemoryError("no room")
        tokens = self.lanes[lane]
        assert len(tokens) >= span.end
        assert span.end == len(tokens) or self._mark == (lane, span.end) or not span.with_state
        state = digest(tokens[: span.end]) if span.with_state else None
        rows = tokens[span.begin : span.end]
        self.nodes[node] = (span, rows, state)
        return self._ticket("save")

    def restore(self, lane: int, nodes: Sequence[str], num_tokens: int) -> Ticket:
        tokens: list[int] = []
        for node in nodes:
            span, rows, state = self.nodes[node]
            assert span.begin == len(tokens) < num_tokens
            tokens += rows
        if self.recurrent:
            assert len(tokens) == num_tokens
            assert state == digest(tokens)
        self.lanes[lane] = tokens[:num_tokens]
        return self._ticket("restore")

    def _ticket(self, verb: str) -> Ticket:
        if verb not in self.late:
            return DoneTicket()
        self._tickets.append(LateTicket())
        return self._tickets[-1]

    def drop(self, node: str, *, state_only: bool = False) -> None:
        if state_only:
            span, rows, _ = self.nodes[node]
            self.nodes[node] = (replace(span, with_state=False), rows, None)
            return
        self.nodes.pop(node, None)
        if self.memory is not None and node in self._places:
            self.memory.give(*self._places.pop(node))

    def shapes(self, span: Span) -> dict[str, Shape]:
        rows = {"ls0_attn_k.0": ((span.end - span.begin,), torch.int64)}
        return rows | ({"ls0_delta.1": ((1,), torch.int64)} if span.with_state else {})

    def export(self, node: str) -> dict[str, Tensor]:
        _, rows, state = self.nodes[node]
        tensors = {"ls0_attn_k.0": torch.tensor(rows)}
        return tensors if state is None else tensors | {"ls0_delta.1": torch.tensor([state])}

    def adopt(self, node: str, span: Span, tensors: Mapping[str, Tensor]) -> None:
        names = {"ls0_attn_k.0", *(["ls0_delta.1"] if span.with_state else [])}
        if tensors.keys() != names or len(tensors["ls0_attn_k.0"]) != span.end - span.begin:
            raise SnapshotMismatch("not the node's tensors")
        state = int(tensors["ls0_delta.1"][0]) if span.with_state else None
        self.nodes[node] = (span, tensors["ls0_attn_k.0"].tolist(), state)

    def _take(self, node: str, num_bytes: int) -> bool:
        if self.memory is None:
            return True
        begin = self.memory.take(num_bytes)
        if begin is not None:
            self._places[node] = (begin, begin + num_bytes)
        return begin is not None

    def _logits(self, lanes: Sequence[int]) -> Tensor:
        tokens = torch.tensor([following(self.lanes[lane]) for lane in lanes])
        logits = torch.nn.functional.one_hot(tokens, VOCAB_SIZE).float()
        return logits * float("nan") if self.is_sick else logits


class FakeDisk:
    """Files in a dict, a node's two as one. Orders wait until `deliver` carries them out, one after
    the other. `written`: keys of rows, `ends_written`: of ends.
    """

    def __init__(self) -> None:
        self.files: dict[bytes, HalfNode] = {}
        self.jobs: list[Callable[[PrefixCache, Miss | None], None]] = []
        self.reads: list[bytes] = []
        self.timeouts_s: list[float | None] = []  # of these reads
        self.given_up: list[bytes] = []
        self.sought: list[list[bytes]] = []
        self.written: list[bytes] = []
        self.ends_written: list[bytes] = []
        self.quarantined: list[bytes] = []
        self.removed_of_others: list[int] = []

    def file_bytes(self, tensors: Mapping[str, Tensor]) -> int:
        return sum(tensor.nbytes for tensor in tensors.values())

    def read(self, orders: Sequence[ReadOrder]) -> None:
        for order in orders:
            self.reads.append(order.key)
            self.timeouts_s.append(order.timeout_s)
            self.jobs.append(lambda p, fault, o=order: p.fetched(o.key, fault or self._fetch(o)))

    def find(self, orders: Sequence[FindOrder]) -> None:
        def job(prefixes: PrefixCache, fault: Miss | None) -> None:
            keys = {order.key for order in orders if fault is None}
            there = [self.files[key] for key in keys if key in self.files]
            prefixes.found(orders, [_found(node) for node in there])

        self.sought.append([order.key for order in orders])
        self.jobs.append(job)

    def give_up(self, keys: Sequence[bytes]) -> None:
        self.given_up += keys

    def write(self, node: HalfNode) -> None:
        def job(prefixes: PrefixCache, fault: Miss | None) -> None:
            if fault is None:
                self._put(node)
            busy = fault is not None and fault.reason.is_passing
            prefixes.written(node.key, WriteReport(node.half, fault is None, busy, _bytes_of(node)))

        self.jobs.append(job)

    def remove(self, keys: Sequence[bytes]) -> None:
        self.jobs.append(lambda prefixes, fault: [self.files.pop(key, None) for key in keys])

    def remove_ends(self, keys: Sequence[bytes]) -> None:
        self.jobs.append(lambda prefixes, fault: [self._drop_end(key) for key in keys])

    def _put(self, node: HalfNode) -> None:
        (self.written if node.half is Half.ROWS else self.ends_written).append(node.key)
        there = self.files.get(node.key)
        if there is None and node.half is Half.END:
            return  # an end that no rows belong to
        tensors = {**(there.tensors if there else {}), **node.tensors}
        self.files[node.key] = replace(node, half=Half.ROWS, tensors=tensors)

    def _drop_end(self, key: bytes) -> None:
        if node := self.files.get(key):
            rows = {n: t for n, t in node.tensors.items() if part_of(n, END_KINDS) not in END_PARTS}
            self.files[key] = replace(node, tensors=rows)

    def remove_others(self, num_bytes: int) -> None:
        self.removed_of_others.append(num_bytes)

    def touch(self, keys: Sequence[bytes]) -> None:
        assert all(isinstance(key, bytes) for key in keys)

    def quarantine(self, key: bytes) -> None:
        self.quarantined.append(key)
        self.files.pop(key, None)

    def deliver(self, prefixes: PrefixCache, fault: Miss | None = None, index: int = 0) -> None:
        """Carry out one order; with a fault it fails."""
        self.jobs.pop(index)(prefixes, fault)

    def deliver_all(self, prefixes: PrefixCache) -> None:
        """Carry out all orders, and what follows from them."""
        while self.jobs or prefixes.has_due_writes:
            prefixes.hand_over()
            if self.jobs:
                self.deliver(prefixes)

    def nodes(self) -> list[Node]:
        """What a scan would find."""
        return [_found(node) for node in self.files.values()]

    def _fetch(self, order: ReadOrder) -> FetchedNode | Miss:
        node = self.files.get(order.key)
        if node is None:
            return GONE
        tensors = {
            name: tensor
            for name, tensor in node.tensors.items()
            if order.with_end or part_of(name, END_KINDS) is NodePart.SPAN
        }
        return FetchedNode(tensors, _parts(tensors), _parts(node.tensors), num_bytes=1)


def _bytes_of(node: HalfNode) -> int:
    """The size that the index counts of it, from which it is found again."""
    num_tokens = node.end - node.begin
    if node.half is Half.ROWS:
        return TOKEN_BYTES * num_tokens
    parts = _parts(node.tensors)
    return STATE_BYTES * (NodePart.STATE in parts) + 4 * VOCAB_SIZE * (NodePart.LOGITS in parts)


def _parts(names: Iterable[str]) -> frozenset[NodePart]:
    return frozenset(part_of(name, END_KINDS) for name in names)


def _found(node: HalfNode) -> Node:
    tokens = array("i", node.tensors["tokens"].tolist())
    parts = _parts(node.tensors)
    logits_bytes = 4 * VOCAB_SIZE * (NodePart.LOGITS in parts)
    return Node(
        key=node.key,
        parent=node.parent,
        begin=node.begin,
        tokens=tokens,
        tiers=DISK,
        state_tiers=DISK if NodePart.STATE in parts else NOWHERE,
        logits_tiers=DISK if NodePart.LOGITS in parts else NOWHERE,
        num_bytes=TOKEN_BYTES * len(tokens),
        state_bytes=STATE_BYTES * (NodePart.STATE in parts) + logits_bytes,
        is_turn_end=node.is_turn_end,
        is_generated=node.is_generated,
    )


class Bench:
    """The prefixes of one server, and lanes that are run by hand."""

    def __init__(
        self, *, recurrent: bool = True, disk: FakeDisk | None = None, num_lanes: int = 4, **limits
    ) -> None:
        self.target = TokenTarget(num_lanes, recurrent=recurrent)
        self.memory = MemoryNodes(self.target, UnreadFeatures(), VOCAB_SIZE, PagelessLanes())
        self.disk = disk or FakeDisk()
        sizes = {"memory_bytes": 1 << 20, "disk_bytes": 1 << 20, **limits}
        self.prefixes = PrefixCache(
            self.memory, self.disk, Limits(**sizes), recurrent=recurrent, chunk_tokens=CHUNK
        )
        self.prefixes.listen(lambda call: call())
        self.prefixes.files_changed(self.disk.nodes(), [])

    @property
    def index(self):
        return self.prefixes.index

    def lease(
        self,
        prompt: Sequence[int],
        *boundaries: int,
        tenant=NO_TENANT,
        keep=False,
        conversation="",
        **fields,
    ):
        request = Request(
            TokenPrompt(tuple(prompt)), keep_prefix=keep, client="c", conversation=conversation
        )
        lease = lease_of(prompt, *boundaries, tenant=tenant, request=request, **fields)
        self.prefixes.admit(lease)
        return lease

    def start(self, lease: Lease, lane: int = 0) -> int:
        """Take up what there is; the number of tokens."""
        assert self.prefixes.prepare(lease, [])
        self.target.reset(lane)
        num_tokens = self.prefixes.restore(lease, lane)
        assert self.prefixes.has_restored(lease)
        assert self.target.lanes[lane] == list(lease.prompt[:num_tokens])
        return num_tokens

    def prefill(self, lease: Lease, lane: int = 0, begin: int = 0, until: int | None = None):
        """Run the prompt from `begin` on."""
        num_tokens = lease.num_prompt_tokens
        while begin < (until or num_tokens):
            end = chunk_end(begin, num_tokens, CHUNK, lease.splits)
            tokens, mark = lease.prompt[begin:end], lease.mark_within(begin, end)
            is_last = end == num_tokens
            logits = self.target.prefill(lane, begin, tokens, project=is_last, mark=mark)
            self.prefixes.save_prompt(lease, lane, end, logits)
            begin = end

    def end(
        self, lease: Lease, num_generated: int = 0, lane: int = 0, *, is_cut: bool = False
    ) -> None:
        """Generate, but do not run, one token more than `num_generated`; then let go."""
        for _ in range(num_generated):
            token = following(self.target.lanes[lane])
            lease.sequence.append(token)
            self.target.decode([lane], [len(self.target.lanes[lane])], [token])
        self.prefixes.save_sequence(lease, lane, len(self.target.lanes[lane]), is_cut=is_cut)
        self.prefixes.release(lease)

    def serve(self, prompt: Sequence[int], *boundaries: int, num_generated: int = 0, **how) -> int:
        """A whole request; the number of tokens that were taken up."""
        lease = self.lease(prompt, *boundaries, **how)
        while not self.prefixes.prepare(lease, []):
            self.disk.deliver(self.prefixes)
        num_cached = self.start(lease)
        self.prefill(lease, begin=num_cached)
        self.end(lease, num_generated)
        return num_cached

    def ends(self, tier: str) -> dict[int, bool]:
        """Of each node in the tier its end, and whether its state is held there."""
        return {n.end: tier in n.state_tiers for n in self.index if tier in n.tiers}
