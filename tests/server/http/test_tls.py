"""An unusable certificate is refused in one line; a usable one is served to all TLS clients."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from luceasync.cli.chat.responders import AnswerOptions, ShownPiece, open_remote
from luceasync.errors import ConfigError, Unavailable
from luceasync.options import load_config
from luceasync.server.http import connections as connections_module
from luceasync.server.http.listener import tls_context
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine
from tests.server.secure import CERT, DEADLINE_S, FILES, KEY, SECURE, trusting


def test_without_a_certificate_there_is_no_tls():
    assert tls_context(ServerConfig()) is None


def test_tls_1_2_is_the_minimum():
    context = tls_context(SECURE)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("cert", "key", "words"),
    [
        ("none.pem", "key.pem", "none.pem: cannot be read (No such file"),
        ("cert.pem", "none.pem", "none.pem: cannot be read (No such file"),
        ("", "key.pem", "cannot be read (Is a directory)"),
        ("key.pem", "key.pem", "--tls-cert .*key.pem: holds none"),
        ("cert.pem", "cert.pem", "--tls-key .*cert.pem: holds none"),
        ("cert.pem", "encrypted-key.pem", "the key is encrypted"),
        ("cert.pem", "other-key.pem", "the key does not belong to the certificate"),
    ],
)
def test_unusable_files_are_refused(cert, key, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(").replace(")", r"\)")):
        tls_context(ServerConfig(tls_cert=FILES / cert, tls_key=FILES / key))


def test_a_truncated_certificate_is_refused(tmp_path):
    cut = tmp_path / "cut.pem"
    cut.write_text(CERT.read_text()[:200] + "\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match="OpenSSL does not accept them"):
        tls_context(ServerConfig(tls_cert=cut, tls_key=KEY))


@pytest.mark.parametrize(("given", "missing"), [("tls-cert", "tls-key"), ("tls-key", "tls-cert")])
def test_one_without_the_other_is_refused(given, missing):
    with pytest.raises(ConfigError, match=f"not allowed without --{missing}"):
        load_config({given: str(CERT)}, {}, None)


def test_a_key_that_others_can_read_is_logged(tmp_path, caplog):
    key = tmp_path / "key.pem"
    key.write_bytes(KEY.read_bytes())
    key.chmod(0o600)
    load_config({"tls-cert": str(CERT), "tls-key": str(key)}, {}, None)
    assert not caplog.messages
    key.chmod(0o644)
    load_config({"tls-cert": str(CERT), "tls-key": str(key)}, {}, None)
    assert caplog.messages == [
        f"{key} holds a private key and is accessible to other users: chmod 600 it"
    ]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_both_versions_are_served(on_port, version):
    async with on_port(ScriptedEngine(), SECURE) as client:
        context = trusting("http/1.1")
        context.minimum_version = context.maximum_version = version
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize("offered", [("h2", "http/1.1"), ("h2",), ()])
async def test_http_1_1_alone_is_offered(on_port, offered):
    async with on_port(ScriptedEngine(), SECURE) as client:
        host, port = client.base_url.host, client.base_url.port
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting(*offered))
        tls = writer.get_extra_info("ssl_object")
        assert tls.selected_alpn_protocol() == ("http/1.1" if "http/1.1" in offered else None)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_the_terminal_chat_trusts_ssl_cert_file(on_port, monkeypatch):
    async with on_port(ScriptedEngine(), SECURE) as client:
        messages = [{"role": "user", "content": "Hi"}]
        async with open_remote(str(client.base_url), None) as voice:
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                [piece async for piece in voice.reply(messages, AnswerOptions())]
        monkeypatch.setenv("SSL_CERT_FILE", str(CERT))
        async with open_remote(str(client.base_url), None) as voice:
            heard = [piece async for piece in voice.reply(messages, AnswerOptions())]
            said = [piece.text for piece in heard if isinstance(piece, ShownPiece)]
            assert "".join(said) == "Hello!"


async def test_a_client_without_tls_is_disconnected(on_port):
    async with on_port(ScriptedEngine(), SECURE) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert b"HTTP/1.1 200" not in await _rest(reader)
        writer.close()


async def test_a_handshake_that_never_ends_has_a_deadline(on_port, monkeypatch):
    monkeypatch.setattr(connections_module, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with on_port(ScriptedEngine(), SECURE) as client:
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(b"\x16\x03\x01")
        assert await _rest(reader) == b""
        writer.close()


async def test_handshakes_that_never_end_are_bounded_and_hold_up_no_client(on_port, monkeypatch):
    monkeypatch.setattr(connections_module, "MAX_HANDSHAKES", 4)
    async with on_port(ScriptedEngine(), SECURE) as client:
        assert (await client.get("/health")).status_code == 200  # its connection stays open
        host, port = client.base_url.host, client.base_url.port
        silent = [await asyncio.open_connection(host, port) for _ in range(12)]
        for reader, _ in silent[:8]:
            assert await _rest(reader) == b""
        assert (await client.get("/health")).status_code == 200
        new = await asyncio.open_connection(host, port, ssl=trusting())
        for _, writer in [*silent, new]:
            writer.transport.abort()


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), DEADLINE_S)
    except ConnectionError:
        return b""
