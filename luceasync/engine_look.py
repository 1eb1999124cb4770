"""A closer look at an engine: what is on each lane, who waits, what of prompts is kept.

Owns the words only; luceasync.request is where it is asked for. No text and no token is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaneLook:
    """What runs on a lane: `phase` is restoring, prefilling, decoding or unread; the lane holds
    `done_tokens` of the prompt, of which `cached_tokens` were not run. Seconds since it began.
    `tau` None: there is no draft; tokens on the devices and away from them None: all are there.
    """

    lane: int
    phase: str
    prompt_tokens: int
    done_tokens: int
    cached_tokens: int
    generated_tokens: int
    max_tokens: int
    running_s: float
    tau: float | None = None
    rounds: int = 0
    resident_tokens: int | None = None
    absent_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WaitingLook:
    """One that waits for a lane."""

    prompt_tokens: int
    waiting_s: float


@dataclass(frozen=True, slots=True)
class NodeLook:
    """A kept node, tokens `[begin, end)` behind those of `parent`: bytes by tier, in how many
    requests it was taken up, and seconds since it last was. Keys are as files are named.
    """

    key: str
    parent: str | None
    begin: int
    end: int
    num_bytes: Mapping[str, int]
    has_state: bool
    hits: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class EngineLook:
    """All of it; of `nodes` those that were used last, and how many there are."""

    lanes: tuple[LaneLook, ...] = ()
    waiting: tuple[WaitingLook, ...] = ()
    nodes: tuple[NodeLook, ...] = ()
    num_nodes: int = 0
    device_bytes: Mapping[str, int] | None = None
