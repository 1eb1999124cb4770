"""What recorded answers report of refusals and of the cache, whichever API they are of.

Owns what must hold of an agent's prompts. Knows no client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.acceptance.clients.record import Exchange

SLACK_TOKENS = 16  # which open an answer; the next turn may write them otherwise

Counts = tuple[int, int]  # tokens of a prompt, and those that were cached


def usage(exchange: Exchange) -> Counts | None:
    """Prompt tokens and cached ones, as the answer reports them; None without a report."""
    found = None
    for told in _told(exchange, "usage"):
        found = _counts(told) or found
    return found


def tier(exchange: Exchange) -> str | None:
    """Where the beginning of the prompt was restored from."""
    found = None
    for told in _told(exchange, "luceasync"):
        found = told["tier"]
    return found


def _told(exchange: Exchange, name: str) -> Iterable[dict[str, Any]]:
    for event in exchange.events:
        told = event.get(name) or (event.get("response") or {}).get(name)
        if told:
            yield told


def _counts(told: dict[str, Any]) -> Counts | None:
    if "cache_read_input_tokens" in told:
        cached = told["cache_read_input_tokens"]
        return told["input_tokens"] + cached, cached
    details = told.get("prompt_tokens_details") or told.get("input_tokens_details")
    if details is None:
        return None
    return told.get("prompt_tokens") or told["input_tokens"], details["cached_tokens"]


def refusals(seen: Iterable[Exchange]) -> list[str]:
    """Requests that were refused or failed."""
    return [
        f"{one.method} {one.path}: {one.status} {one.answer[:200]}"
        for one in seen
        if one.status >= 400 and one.path != "/ready"
    ]


def of_agent(seen: Iterable[Exchange]) -> list[Exchange]:
    """An agent's own requests, which have tools; those for titles have none."""
    return [one for one in seen if '"tools"' in one.body and one.status == 200]


def uncached(runs: Sequence[Sequence[Exchange]]) -> list[str]:
    """Prompts of which less was cached than the prompt before had. The first of a run, which a user
    begins, is compared with the first of the run before: templates leave out thoughts since then.
    """
    faults, firsts = [], [run[0] for run in runs if run]
    for i, run in enumerate(runs):
        for j, one in enumerate(run):
            before = run[j - 1] if j else firsts[i - 1] if i else None
            if before is None:
                continue
            prompt, found = usage(before), usage(one)
            if prompt is None or found is None or found[1] < prompt[0] - SLACK_TOKENS:
                faults.append(f"request {j} of run {i}: {found} after {prompt}")
    return faults
