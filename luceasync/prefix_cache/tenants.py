"""The tenants: for each the key under which prefixes are shared, and the history of its answers.

Owns the histories, and the nodes on disk from which they are rebuilt: after a restart, and when
another server has answered. Does not know lanes; used from the event loop and its worker threads.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from luceasync.nodes import NodeKey
from luceasync.prefix_tree.node import Node, node_key, tenant_key
from luceasync.text.history import History
from luceasync.text.prompt import PastCall, Tenant

log = logging.getLogger(__name__)

NO_TENANT = tenant_key("")  # shared by all clients without an API key
MAX_TENANTS = 64
MAX_LEARNED_TOKENS = 2**20  # of one tenant after a restart; takes about two seconds
MAX_UNLEARNED = 4096  # nodes of other servers, only the newest
SEAM_TOKENS = 4  # before an answer, which may be encoded differently together with it
MAX_TOKENS_HELD = 2**24  # in the histories of all tenants: 64 MiB


class Tenants:
    """The tenants that have sent requests; the least recent one is forgotten first."""

    def __init__(
        self,
        new_history: Callable[[], History],
        calls_in: Callable[[Sequence[int]], Iterable[PastCall]] = lambda ids: (),
    ) -> None:
        """`calls_in`: finds the tool calls in token ids that the model has generated."""
        self._new_history = new_history
        self._calls_in = calls_in
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._nodes: dict[NodeKey, Node] = {}  # on disk
        self._unlearned: OrderedDict[NodeKey, Node] = OrderedDict()  # found since the start
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Tenants({len(self._tenants)}, {len(self._nodes)} nodes on disk)"

    def note(self, added: Iterable[Node], removed: Iterable[NodeKey]) -> None:
        """Follow changes on the disk."""
        self.remove_nodes(removed)
        self.add_nodes(added)

    def add_nodes(self, nodes: Iterable[Node]) -> None:
        """Add nodes that were found on the disk. A new tenant learns from them in `get`, a known
        one when `learn_more` is called."""
        with self._lock:
            for node in nodes:
                known = self._nodes.get(node.key)
                if _is_end(node) and (known is None or not _is_end(known)):
                    self._unlearned[node.key] = node
                self._nodes[node.key] = node
            while len(self._unlearned) > MAX_UNLEARNED:
                self._unlearned.popitem(last=False)

    def remove_nodes(self, keys: Iterable[NodeKey]) -> None:
        """Forget nodes that are not on disk any more."""
        with self._lock:
            for key in keys:
                self._nodes.pop(key, None)
                self._unlearned.pop(key, None)

    def learn_more(self, tenant: Tenant, ids: array[int]) -> bool:
        """Learn answers of other servers in a prompt of `ids`: sequences found since the start that
        part from it at an answer, whose text may be the same. Returns whether there were any."""
        with self._lock:
            ends = [n for n in self._unlearned.values() if self._parts_at_answer(n, ids)]
            return self._learn_ends(tenant, ends) > 0

    def _parts_at_answer(self, node: Node, ids: array[int]) -> bool:
        """Whether the sequence that ends with the node parts from `ids` at an answer."""
        chain = self._chain(node)
        for part, below in zip_longest(chain, chain[1:]):
            end = min(part.end, len(ids))
            there, here = part.tokens[: end - part.begin], ids[part.begin : end]
            if there == here:
                continue
            is_seam = below is not None and below.is_generated
            is_seam = is_seam and there[:-SEAM_TOKENS] == here[:-SEAM_TOKENS]
            return part.is_generated or is_seam
        return False

    def get(self, name: str) -> Tenant:
        """The tenant of that name. The first call learns its answers of earlier runs: call it in a
        worker thread."""
        with self._lock:
            tenant = self._tenants.get(name)
            if tenant is None:
                tenant = Tenant(tenant_key(name), self._new_history())
                self._learn(tenant)
                self._tenants[name] = tenant
            self._tenants.move_to_end(name)
            while self._is_full():
                self._tenants.popitem(last=False)
            return tenant

    def _is_full(self) -> bool:
        """Whether the least recent tenant has to be forgotten."""
        num_tokens = sum(t.history.num_tokens_held for t in self._tenants.values())
        is_over = len(self._tenants) > MAX_TENANTS or num_tokens > MAX_TOKENS_HELD
        return is_over and len(self._tenants) > 1

    def _learn(self, tenant: Tenant) -> None:
        """Learn every sequence that ends with a prompt or with generated tokens, as far as there is
        room; the most recently used ones stay longest."""
        self._learn_ends(tenant, filter(_is_end, self._nodes.values()))

    def _learn_ends(self, tenant: Tenant, nodes: Iterable[Node]) -> int:
        """Learn the sequences that end with those of the nodes that belong to the tenant; returns
        how many."""
        ends = sorted(nodes, key=lambda node: -node.last_used_s)
        learned: list[array[int]] = []
        answers: list[array[int]] = []
        num_tokens = 0
        for node in ends:
            if not self._is_of(tenant, node):
                continue
            num_tokens += node.end
            if num_tokens > MAX_LEARNED_TOKENS:
                break
            self._unlearned.pop(node.key, None)
            if ids := self._sequence(node):
                learned.append(ids)
            if node.is_generated:
                answers.append(node.tokens)
        for ids in reversed(learned):
            tenant.history.relearn(ids)
        for answer in reversed(answers):
            tenant.calls.relearn(self._calls_in(answer))
        return len(learned)

    def _sequence(self, node: Node) -> array[int]:
        """All tokens from the root to the node's end; none if a node in between is missing, or does
        not end where the next one begins (so a cycle of parents ends, too)."""
        ids = array("i")
        for part in self._chain(node):
            ids.extend(part.tokens)
        return ids

    def _chain(self, node: Node) -> list[Node]:
        """The nodes from the root to this one; see `_sequence`."""
        chain = [node]
        while (above := self._parent(chain[-1])) is not None and above.end == chain[-1].begin:
            chain.append(above)
        return chain[::-1] if chain[-1].parent is None else []

    def _parent(self, node: Node) -> Node | None:
        return None if node.parent is None else self._nodes.get(node.parent)

    @staticmethod
    def _is_of(tenant: Tenant, node: Node) -> bool:
        return node_key(node.tokens, tenant.key, node.parent) == node.key


def _is_end(node: Node) -> bool:
    """Whether a sequence that may be sent again ends here: a prompt, or generated tokens."""
    return node.is_generated or node.has_logits
