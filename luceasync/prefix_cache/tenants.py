"""The tenants: for each the key under which prefixes are shared, and the history of what it said.

Owns the histories, and the nodes on disk from which they are learned again after a restart. Knows
no lanes; used from the event loop and its worker threads.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from luceasync.nodes import NodeKey
from luceasync.prefix_tree.node import Node, node_key, tenant_key
from luceasync.text.history import History
from luceasync.text.prompt import PastCall, Tenant

log = logging.getLogger(__name__)

NO_TENANT = tenant_key("")  # shared by all clients without an API key
MAX_TENANTS = 64
MAX_LEARNED_TOKENS = 2**20  # of one tenant after a restart; two seconds of work
MAX_TOKENS_HELD = 2**24  # in the histories of all tenants: 64 MiB


class Tenants:
    """The tenants that have sent requests; the least recent one is forgotten first."""

    def __init__(
        self,
        new_history: Callable[[], History],
        calls_in: Callable[[Sequence[int]], Iterable[PastCall]] = lambda ids: (),
    ) -> None:
        """`calls_in`: the calls in token ids that the model has generated."""
        self._new_history = new_history
        self._calls_in = calls_in
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._nodes: dict[NodeKey, Node] = {}  # on disk when the server started
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Tenants({len(self._tenants)}, {len(self._nodes)} nodes on disk)"

    def add_nodes(self, nodes: Iterable[Node]) -> None:
        """Take in nodes that an earlier run has left; tenants that are known already do not learn
        them.
        """
        with self._lock:
            self._nodes.update((node.key, node) for node in nodes)

    def get(self, name: str) -> Tenant:
        """The tenant of that name. The first call learns what it said in earlier runs: call it in a
        worker thread.
        """
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
        """Whether the least recent tenant is to be forgotten."""
        num_tokens = sum(t.history.num_tokens_held for t in self._tenants.values())
        is_over = len(self._tenants) > MAX_TENANTS or num_tokens > MAX_TOKENS_HELD
        return is_over and len(self._tenants) > 1

    def _learn(self, tenant: Tenant) -> None:
        """Learn every sequence that ends with a prompt or with what the model wrote, as far as
        there is room; what was used last stays longest.
        """
        ends = [n for n in self._nodes.values() if n.is_generated or n.has_logits]
        ends.sort(key=lambda node: -node.last_used_s)
        learned: list[array[int]] = []
        answers: list[array[int]] = []
        num_tokens = 0
        for node in ends:
            if not self._is_of(tenant, node):
                continue
            num_tokens += node.end
            if num_tokens > MAX_LEARNED_TOKENS:
                break
            if ids := self._sequence(node):
                learned.append(ids)
            if node.is_generated:
                answers.append(node.tokens)
        for ids in reversed(learned):
            tenant.history.relearn(ids)
        for answer in reversed(answers):
            tenant.calls.relearn(self._calls_in(answer))

    def _sequence(self, node: Node) -> array[int]:
        """All tokens from the root to the node's end; none if a node between is missing, or does
        not end where the next one begins, so that a cycle of parents ends too.
        """
        chain = [node]
        while (above := self._parent(chain[-1])) is not None and above.end == chain[-1].begin:
            chain.append(above)
        ids = array("i")
        if chain[-1].parent is None:
            for part in reversed(chain):
                ids.extend(part.tokens)
        return ids

    def _parent(self, node: Node) -> Node | None:
        return None if node.parent is None else self._nodes.get(node.parent)

    @staticmethod
    def _is_of(tenant: Tenant, node: Node) -> bool:
        return node_key(node.tokens, tenant.key, node.parent) == node.key
