"""Recent responses and their items, kept in memory so that later requests can refer to them.

Owns for whom and how long they are kept. Knows no events.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from luceasync.errors import RequestError
from luceasync.server.openai.responses_items import InputItem

MAX_BYTES = 64 << 20  # of all conversations, as JSON

Conversation = tuple[InputItem, ...]


class _Kept(NamedTuple):
    """A conversation up to and with one response."""

    items: Conversation
    num_bytes: int


@dataclass(slots=True)
class _OfTenant:
    """The responses of one tenant by id, the oldest first, and their items, each with the newest
    response that has it.
    """

    responses: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)
    items: dict[str, tuple[str, InputItem]] = field(default_factory=dict)
    num_bytes: int = 0

    def drop_oldest(self) -> int:
        """Forget a response; returns its bytes."""
        response_id, kept = self.responses.popitem(last=False)
        self.num_bytes -= kept.num_bytes
        for item in kept.items:
            if item.id is not None and self.items.get(item.id, ("",))[0] == response_id:
                del self.items[item.id]
        return kept.num_bytes


class ResponseStore:
    """Beyond `max_bytes` the tenant that has most loses its oldest response. Safe to call from any
    thread.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._tenants: dict[str, _OfTenant] = {}
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"ResponseStore({self._num_bytes} of {self._max_bytes} bytes)"

    def keep(self, tenant: str, response_id: str, items: Sequence[InputItem]) -> None:
        """Keep a conversation that ends with the response."""
        num_bytes = len(msgspec.json.encode(items))
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            kept = self._tenants.setdefault(tenant, _OfTenant())
            kept.responses[response_id] = _Kept(tuple(items), num_bytes)
            kept.items.update(
                (item.id, (response_id, item)) for item in items if item.id is not None
            )
            kept.num_bytes += num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop_one()

    def _drop_one(self) -> None:
        name, most = max(self._tenants.items(), key=lambda one: one[1].num_bytes)
        self._num_bytes -= most.drop_oldest()
        if not most.responses:
            del self._tenants[name]

    def conversation(self, tenant: str, response_id: str | None) -> Conversation:
        """The items up to and with the response; none for None. Raises RequestError."""
        if response_id is None:
            return ()
        with self._lock:
            kept = self._tenants.get(tenant, _OfTenant()).responses.get(response_id)
        if kept is None:
            raise RequestError(
                f"Previous response with id '{response_id[:100]}' not found. Recent responses are "
                "kept in memory, unless 'store' is false: send the whole conversation as 'input'.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return kept.items

    def item(self, tenant: str, item_id: str | None, where: str) -> InputItem:
        """The item of that id. Raises RequestError, which names the field below `where`."""
        with self._lock:
            found = self._tenants.get(tenant, _OfTenant()).items.get(item_id or "")
        if found is None:
            raise RequestError(
                f"Item with id '{(item_id or '')[:100]}' not found. Items of recent responses are "
                "kept in memory, unless 'store' is false: send the item itself.",
                param=f"{where}.id",
                code="item_not_found",
            )
        return found[1]
