"""Files that other servers have just written: looked for by their names, before a scan lists them.

Names follow from the tokens, so what continues a match needs no list of the directory. Owns which
names are being looked for and which were not there. Engine thread only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from luceasync.nodes import NodeKey
from luceasync.prefix_cache.disk_orders import DiskOrders
from luceasync.prefix_cache.index import Limits, NodeIndex
from luceasync.prefix_cache.lease import (
    MIN_LAST_TOKENS,
    Lease,
    chunk_ends,
    fork_behind_tools,
    opener_of,
    split_points,
)
from luceasync.prefix_tree.node import Match, node_key
from luceasync.prefix_tree.policy import plan_cuts

ABSENT_S = 5.0  # how long a name that was not there is taken not to be
MAX_TAIL_TOKENS = 4  # that a template puts between the last token of an answer and the next turn
MAX_ABSENT = 4096


class DirectLookup:
    """Looks for files that continue what is known of a prompt, in a directory of several hosts."""

    def __init__(
        self,
        index: NodeIndex,
        disk: DiskOrders,
        limits: Limits,
        *,
        recurrent: bool,
        chunk_tokens: int,
        min_fork_tokens: int,
    ) -> None:
        self._index = index
        self._disk = disk
        self._limits = limits
        self._recurrent = recurrent
        self._chunk_tokens = chunk_tokens
        self._min_fork_tokens = min_fork_tokens
        self._pending: set[NodeKey] = set()
        self._absent: dict[NodeKey, float] = {}  # since when each is known not to be there

    def is_due(self, lease: Lease, match: Match) -> bool:
        """Whether the lease has to wait: files are being looked for that may continue its match.
        Those below a node are looked for once.
        """
        if not self._limits.is_shared or lease.without_disk or lease.is_run_whole:
            return False
        if lease.sought & self._pending:
            return True
        if lease.num_prompt_tokens - match.num_tokens < self._limits.min_disk_tokens:
            return False
        begin = match.nodes[-1].end if match.nodes else 0
        # A recurrent model's match ends before nodes whose states are gone; others may go on there.
        known = self._index.tree(lease.tenant).whole_nodes(lease.prompt)
        tips: dict[NodeKey | None, int] = {n.key: n.end for n in known if n.end >= begin}
        tips |= {} if begin else {None: 0}
        below = tips.keys() - lease.sought_below
        keys = {key for tip in below for key in self._names(lease, tip, tips[tip])}
        lease.seek(keys, below)
        new = [key for key in keys if key not in self._pending]
        self._pending.update(new)
        if new:
            self._disk.find(new)
        return bool(lease.sought & self._pending)

    def found(self, asked: Iterable[NodeKey], there: Iterable[NodeKey]) -> None:
        """Take in which of the names that were asked for are there."""
        now_s = time.monotonic()
        asked = set(asked)
        self._pending -= asked
        self._absent |= dict.fromkeys(asked.difference(there), now_s)
        if len(self._absent) > MAX_ABSENT:
            self._absent = {k: s for k, s in self._absent.items() if now_s - s < ABSENT_S}

    def _names(self, lease: Lease, below: NodeKey | None, begin: int) -> set[NodeKey]:
        """The keys of nodes below `below` that may be there, and are not known."""
        now_s = time.monotonic()
        keys = {
            node_key(lease.sequence[begin:end], lease.tenant, below)
            for end in likely_ends(
                begin,
                lease.num_prompt_tokens,
                lease.boundaries,
                lease.rendered.tools_end,
                interval_tokens=self._limits.interval_tokens,
                chunk_tokens=self._chunk_tokens if self._recurrent else None,
                min_fork_tokens=self._min_fork_tokens,
            )
        }
        return {
            key
            for key in keys
            if key not in self._index and now_s - self._absent.get(key, -ABSENT_S) >= ABSENT_S
        }


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
    end anywhere. Of a prefill from `begin` on, the first end counts; of an answer, its last token.
    """
    last = opener_of(boundaries, num_tokens)
    num_opening = 0 if last is None else num_tokens - last  # of the answer; the same in each turn
    later = [boundary for boundary in boundaries if boundary > begin]
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
    for boundary in later[:2]:  # the end of the turn that begins here, or of the next one
        ends.update(range(boundary - MAX_TAIL_TOKENS + 1, boundary + 1))
    return sorted(end for end in ends if begin < end <= num_tokens)
