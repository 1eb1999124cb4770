"""Finds files that other servers have just written by their names, before a scan lists them.

Names follow from the tokens, so a match can be continued without listing the directory. Owns which
names are being looked for and which were missing. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from luceasync.disk_cache.codec import Half
from luceasync.nodes import NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders, FindOrder
from luceasync.prefix_cache.index import Limits, NodeIndex
from luceasync.prefix_cache.lease import (
    MIN_LAST_TOKENS,
    Lease,
    chunk_ends,
    fork_behind_tools,
    opener_of,
    split_points,
)
from luceasync.prefix_tree.node import Match, Node, node_key
from luceasync.prefix_tree.policy import plan_cuts

ABSENT_S = 5.0  # how long a name that was missing is assumed to stay missing
MAX_TAIL_TOKENS = 4  # that a template inserts between the last token of an answer and the next turn
MAX_ABSENT = 4096
MAX_ENDS = 4  # that are looked for per prompt


FileName = tuple[NodeKey, Half]


class DirectLookup:
    """Looks for files that continue what is known of a prompt, in a directory of several hosts and
    in the store behind it.
    """

    def __init__(
        self,
        index: NodeIndex,
        disk: DiskOrders,
        limits: Limits,
        *,
        recurrent: bool,
        chunk_tokens: int,
        min_fork_tokens: int,
        patience_s: Callable[[int, int], float],
    ) -> None:
        """`patience_s(begin, end)`: how long to wait for a node of these tokens."""
        self._index = index
        self._disk = disk
        self._limits = limits
        self._recurrent = recurrent
        self._chunk_tokens = chunk_tokens
        self._min_fork_tokens = min_fork_tokens
        self._patience_s = patience_s
        self.is_open = False  # opening a directory may take minutes, for which no prompt waits
        self._pending: set[FileName] = set()
        self._absent: dict[FileName, float] = {}  # when each was found to be missing

    def is_due(self, lease: Lease, match: Match) -> bool:
        """Whether the lease has to wait, because files that may continue its match are being looked
        for. The files below a node are looked for once."""
        if not self.is_open or lease.without_disk or lease.is_run_whole:
            return False
        if lease.sought & self._pending:
            return True
        if lease.num_prompt_tokens - match.num_tokens < self._limits.min_disk_tokens:
            return False
        begin = match.nodes[-1].end if match.nodes else 0
        # A recurrent model's match ends before nodes without states; others may continue there.
        known = self._index.tree(lease.tenant).whole_nodes(lease.prompt)
        tips: dict[NodeKey | None, int] = {n.key: n.end for n in known if n.end >= begin}
        tips |= {} if begin else {None: 0}
        below = tips.keys() - lease.sought_below
        orders = [order for tip in below for order in self._rows_below(lease, tip, tips[tip])]
        orders = orders or self._end_of_tip(lease, match, known)
        lease.seek({(order.key, order.half) for order in orders}, below)
        new = [order for order in orders if (order.key, order.half) not in self._pending]
        self._pending.update((order.key, order.half) for order in new)
        if new:
            self._disk.find(new)
        return bool(lease.sought & self._pending)

    def found(self, asked: Iterable[FindOrder], there: Iterable[Node]) -> None:
        """Record which of the requested files were found."""
        now_s = time.monotonic()
        names = {(order.key, order.half) for order in asked}
        found = {(n.key, half) for n in there for half in Half if half is Half.ROWS or n.has_state}
        self._pending -= names
        self._absent |= dict.fromkeys(names - found, now_s)
        if len(self._absent) > MAX_ABSENT:
            self._absent = {k: s for k, s in self._absent.items() if now_s - s < ABSENT_S}

    def _rows_below(self, lease: Lease, below: NodeKey | None, begin: int) -> list[FindOrder]:
        """Nodes below `below` that may exist, and are not known."""
        ends = likely_ends(
            begin,
            lease.num_prompt_tokens,
            lease.boundaries,
            lease.rendered.tools_end,
            interval_tokens=self._limits.interval_tokens,
            chunk_tokens=self._chunk_tokens if self._recurrent else None,
            min_fork_tokens=self._min_fork_tokens,
        )
        keys = {node_key(lease.sequence[begin:end], lease.tenant, below): end for end in ends}
        return [
            FindOrder(key, Half.ROWS, self._patience_s(begin, end))
            for key, end in keys.items()
            if key not in self._index and self._may_be_there((key, Half.ROWS))
        ]

    def _end_of_tip(self, lease: Lease, match: Match, known: Sequence[Node]) -> list[FindOrder]:
        """The end of the last node that may have one in the store, for a model that continues only
        from a saved state. One at a time, as states are large."""
        if not (self._recurrent and self._limits.has_store):
            return []
        usable = [n for n in known if match.num_tokens < n.end < lease.num_prompt_tokens]
        for node in sorted(usable, key=lambda node: -node.end):
            is_new = node.key not in lease.sought_ends and self._may_be_there((node.key, Half.END))
            if is_new and not node.has_state and len(lease.sought_ends) < MAX_ENDS:
                work_s = self._patience_s(match.num_tokens, node.end)
                return [FindOrder(node.key, Half.END, work_s)]
        return []

    def _may_be_there(self, name: FileName) -> bool:
        """Whether the name was not found missing recently."""
        return time.monotonic() - self._absent.get(name, -ABSENT_S) >= ABSENT_S


def likely_ends(
    begin: int,
    num_tokens: int,
    boundaries: Sequence[int],
    tools_end: int | None,
    *,
    interval_tokens: int,
    chunk_tokens: int | None,
    min_fork_tokens: int,
) -> list[int]:
    """Where a node that begins at `begin` most likely ends, in a prompt of `num_tokens` tokens that
    another server has run, or an earlier turn of it. Pure.

    `boundaries`: where turns of the prompt end. `chunk_tokens`: of the prefill, None where nodes
    end anywhere. In a prefill from `begin` on, the first end counts; in an answer, its last token.
    """
    last = opener_of(boundaries, num_tokens)
    num_opening = 0 if last is None else num_tokens - last  # of the answer; the same in each turn
    later = [boundary for boundary in boundaries if boundary >= begin]
    prompts = {min(boundary + num_opening, num_tokens) for boundary in later} | {num_tokens}
    ends: set[int] = set()
    for prompt_end in prompts:
        turns = [boundary for boundary in boundaries if boundary < prompt_end]
        stops: Sequence[int] = range(prompt_end + 1)
        opener = opener_of(turns, prompt_end)
        fork = fork_behind_tools(tools_end, prompt_end, min_fork_tokens)
        if chunk_tokens is not None:
            splits = {*split_points(turns, prompt_end, chunk_tokens), *([fork] if fork else [])}
            stops = chunk_ends(begin, prompt_end, chunk_tokens, sorted(splits))
            stops = sorted({*stops, *([opener] if opener and begin < opener else [])})
        cuts = plan_cuts(
            begin,
            prompt_end,
            turns,
            interval_tokens=interval_tokens,
            stops=stops,
            min_tokens=MIN_LAST_TOKENS,
            firm=opener,
        )
        ends.update(cut.end for cut in cuts[:1])
        ends.update([fork] if fork is not None else [])
    for boundary in later[:3]:  # end of the turn that begins here, or of the next one
        ends.update(range(boundary - MAX_TAIL_TOKENS + 1, boundary + 1))
    return sorted(end for end in ends if begin < end <= num_tokens)
