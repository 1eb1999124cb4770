"""The first words of two processes: whether they belong together.

Owns what must agree. Knows what is stated as names and words only: a digest of weights, a dtype,
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from luceasync import __version__
from luceasync.errors import PeerRefused
from luceasync.ipc.channel import Channel
from luceasync.ipc.packets import Hello, Message, Refused, Welcome

PROTOCOL = 3  # raise it with whatever changes the meaning of a message


@dataclass(frozen=True, slots=True)
class Statement:
    """What one end says of itself. `states`: what both must say alike, by name."""

    states: Mapping[str, str] = field(default_factory=dict)
    protocol: int = PROTOCOL
    version: str = __version__


def difference(ours: Statement, theirs: Statement) -> str | None:
    """The first thing in which two ends differ, with both values; None where they agree."""
    if ours.protocol != theirs.protocol:
        return f"protocol {ours.protocol} here, {theirs.protocol} there"
    if ours.version != theirs.version:
        return f"luceasync {ours.version} here, {theirs.version} there"
    for name in sorted({*ours.states, *theirs.states}):
        here, there = (each.states.get(name, "not stated") for each in (ours, theirs))
        if here != there:
            return f"{name}: {here} here, {there} there"
    return None


def greet(channel: Channel[Any], statement: Statement, deadline_s: float) -> None:
    """Say hello to a process that was started. Raises PeerRefused where either end does not agree
    with the other, and ChannelClosed; the channel is closed then.
    """
    states = dict(statement.states)
    hello = Hello(statement.protocol, statement.version, states)
    got = channel.call(hello, Message, deadline_s=deadline_s).message
    match got:
        case Welcome(protocol, version, states):
            _check(channel, statement, Statement(states, protocol, version))
        case Refused(words):
            _refuse(channel, f"it refused us: {words}")
        case _:
            _refuse(channel, f"it answered a greeting with {type(got).__name__}")


def be_greeted(channel: Channel[Any], statement: Statement, deadline_s: float) -> None:
    """Wait to be greeted, and answer. Raises as greet() does."""
    got = channel.receive(deadline_s)
    if not isinstance(got.message, Hello):
        _refuse(channel, f"it began with {type(got.message).__name__}, not with a greeting")
    theirs = Statement(got.message.states, got.message.protocol, got.message.version)
    words = difference(statement, theirs)
    if words is not None:
        channel.send(Refused(words), answers=got.number, deadline_s=deadline_s)
        _refuse(channel, words)
    answer = Welcome(statement.protocol, statement.version, dict(statement.states))
    channel.send(answer, answers=got.number, deadline_s=deadline_s)


def _check(channel: Channel[Any], ours: Statement, theirs: Statement) -> None:
    words = difference(ours, theirs)
    if words is not None:
        _refuse(channel, words)


def _refuse(channel: Channel[Any], words: str) -> None:
    channel.close(words)
    raise PeerRefused(channel.closed)
