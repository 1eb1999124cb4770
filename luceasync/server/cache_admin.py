"""/admin/cache: what is kept, and letting go of it, for those who have an admin key.

Owns who may. Knows nothing of how nodes are kept.
"""

from __future__ import annotations

import hmac
import re

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from luceasync.errors import RequestError
from luceasync.request import Engine
from luceasync.server.auth import key_in
from luceasync.server.checks import refuse
from luceasync.server.engine_view import told_look
from luceasync.server.status_pages import json_response

KEY = re.compile(r"[0-9a-f]{64}")


class CacheAdmin:
    """The routes; without an admin key nobody may."""

    def __init__(self, engine: Engine, keys: tuple[str, ...]) -> None:
        self._engine = engine
        self._keys = keys

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/admin/cache", self.all, methods=["GET", "DELETE"]),
            Route("/admin/cache/{key}", self.dropped, methods=["DELETE"]),
        ]

    async def all(self, request: Request) -> Response:
        """The nodes that were used last; or all go that no request needs, from memory and from the
        disk.
        """
        self._check(request)
        if request.method == "DELETE":
            return json_response({"dropped": await self._engine.drop_kept(None)})
        look = told_look(await self._engine.look())
        return json_response({"num_nodes": look["num_nodes"], "nodes": look["nodes"]})

    async def dropped(self, request: Request) -> Response:
        """One goes, and what continues it."""
        self._check(request)
        key = request.path_params["key"]
        if KEY.fullmatch(key) is None:
            refuse("key", key, "the key of a node, 64 hexadecimal digits")
        num_gone = await self._engine.drop_kept([key])
        if not num_gone:
            raise RequestError(
                "No such node is kept, or a request needs it.",
                param="key",
                code="not_found",
                status=404,
            )
        return json_response({"dropped": num_gone})

    def _check(self, request: Request) -> None:
        sent = key_in(request.scope)
        # Every key is compared, so that the time tells nothing of which one was near.
        found = [key for key in self._keys if hmac.compare_digest(sent, key.encode())]
        if not found:
            raise RequestError(
                "This needs an admin key (--admin-key), sent as 'Authorization: Bearer KEY'.",
                code="no_admin_key",
                status=403,
            )
