"""Rendered prompts and leases of tokens alone, without a template."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from luceasync.prefix_cache.lease import Lease
from luceasync.prefix_cache.tenants import NO_TENANT
from luceasync.request import Request, TokenPrompt
from luceasync.text.prompt import RenderedPrompt, Tenant


def rendered(
    ids: Sequence[int], boundaries: Sequence[int] = (), tenant: bytes = NO_TENANT, **fields: Any
) -> RenderedPrompt:
    """Of a tenant without a history."""
    return RenderedPrompt(
        Tenant(tenant, history=None), None, array("i", ids), tuple(boundaries), **fields
    )


def lease_of(
    ids: Sequence[int],
    *boundaries: int,
    tenant: bytes = NO_TENANT,
    request: Request | None = None,
    **fields: Any,
) -> Lease:
    """`fields`: of the RenderedPrompt."""
    request = request or Request(TokenPrompt(tuple(ids)))
    return Lease(request, rendered(ids, boundaries, tenant, **fields))
