"""The wiring of a child is taken from the environment once, and checked."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest

from luceasync.errors import ChannelClosed, ConfigError
from luceasync.ipc.wiring import VARIABLE, Rings, Wiring, connect_to_parent
from tests.ipc.ends import RING_BYTES, SESSION


def told(**more: object) -> tuple[dict[str, str], socket.socket]:
    """The environment of a child, and the other end of its control socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    wiring = Wiring(SESSION, theirs.detach(), RING_BYTES, 1, 0, **more)  # type: ignore[arg-type]
    return {VARIABLE: msgspec.json.encode(wiring).decode()}, ours


def test_a_program_without_a_parent_says_so() -> None:
    with pytest.raises(ConfigError, match="is started by luceasync, which sets LUCEASYNC_WIRING"):
        connect_to_parent((), {})


@pytest.mark.parametrize("text", ["", "{}", '{"session": 0}', "[1, 2", '{"session": "x"}'])
def test_wiring_that_is_none_is_an_error_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}: "):
        connect_to_parent((), {VARIABLE: text})


def test_rings_of_other_sizes_than_told_are_refused() -> None:
    rings = Rings.create((4096, 4096))
    environ, ours = told(rings=os.dup(rings.memory.fd))
    with pytest.raises(ChannelClosed, match=r"12288 bytes, \d+ were expected"):
        connect_to_parent((), environ)
    rings.close()
    ours.close()


def test_what_was_inherited_goes_no_further() -> None:
    rings = Rings.create(RING_BYTES)
    fd = os.dup(rings.memory.fd)
    os.set_inheritable(fd, True)
    environ, ours = told(rings=fd)
    home = connect_to_parent((), environ)
    assert environ == {}
    assert not os.get_inheritable(fd)
    home.close()
    home.close()
    rings.close()
    ours.close()
