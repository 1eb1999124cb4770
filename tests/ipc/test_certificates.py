"""Machines of one authority trust each other, and nobody else; what cannot be used is one line."""

from __future__ import annotations

import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest

from luceasync.errors import ConfigError
from luceasync.ipc.certificates import make_pair, name_of_peer, tls_context
from luceasync.ipc.tcp import parse_url


def names_seen(here: Path, there: Path, name: str) -> tuple[str, str]:
    """Connect with the file of either end; the names that the ends see of each other."""
    ours, theirs = socket.socketpair()
    seen: list[str] = []

    def accept() -> None:
        try:
            with tls_context(there, "--tls", is_server=True).wrap_socket(
                theirs, server_side=True
            ) as tls:
                seen.append(name_of_peer(tls))
                tls.sendall(b".")
        except OSError:
            theirs.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        context = tls_context(here, "--tls", is_server=False)
        with context.wrap_socket(ours, server_hostname=name) as tls:
            assert tls.version() == "TLSv1.3"
            tls.recv(1)  # the other end has looked at our certificate too
            return name_of_peer(tls), seen[0] if seen else ""
    finally:
        ours.close()
        thread.join()


def test_machines_of_one_authority_see_each_other_s_names(tmp_path: Path) -> None:
    [box1] = make_pair(tmp_path / "m", ["box1"])
    [box2] = make_pair(tmp_path / "m", ["box2"])  # later, by the same authority
    assert names_seen(box1, box2, "box2") == ("box2", "box1")
    files = [*(tmp_path / "m").iterdir()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600} and len(files) == 3


def test_a_machine_under_another_name_or_authority_is_refused(tmp_path: Path) -> None:
    box1, box2 = make_pair(tmp_path / "m", ["box1", "box2"])
    [other] = make_pair(tmp_path / "o", ["box2"])
    with pytest.raises(ssl.SSLCertVerificationError, match="not valid for 'box3'"):
        names_seen(box1, box2, "box3")
    with pytest.raises(ssl.SSLCertVerificationError, match="self-signed certificate"):
        names_seen(box1, other, "box2")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["box1"], "box1.pem: is there already"),
        (["box3", "box3"], "box3.pem: is there already, or named twice"),
        (["Box"], "Box: not a machine's name"),
        (["a/b"], "a/b: not a machine's name"),
        (["authority"], "authority: not a machine's name"),
    ],
)
def test_nothing_is_made_for_a_name_that_cannot_be(
    tmp_path: Path, names: list[str], words: str
) -> None:
    make_pair(tmp_path, ["box1"])
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(ConfigError) as caught:
        make_pair(tmp_path, names)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_a_file_that_is_no_machine_s_is_one_line(tmp_path: Path) -> None:
    [box1] = make_pair(tmp_path, ["box1"])
    (tmp_path / "cut.pem").write_bytes(box1.read_bytes()[:300])
    for name in ("cut.pem", "missing.pem", ".", "authority.pem"):
        with pytest.raises(ConfigError, match=r"--tls .*luceasync pair") as caught:
            tls_context(tmp_path / name, "--tls", is_server=True)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("box2:7000", "tcp://box2:7000", "tls://box2", "tls://:7000", "tls://box2:0"),
        *("tls://b:7/x", "tls://box2:70000", "tls://[::1:7000"),
    ],
)
def test_an_url_of_another_form_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="tls://HOST:PORT is expected"):
        parse_url(url)


def test_an_address_of_six_has_brackets() -> None:
    assert str(parse_url("tls://[::1]:7000")) == "[::1]:7000"
