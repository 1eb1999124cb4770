"""Callers share what was computed within their tenant, and a salt only narrows it."""

from __future__ import annotations

import hmac
from itertools import product

import pytest

from luceasync.errors import RequestError
from luceasync.server.http.auth import Caller, network_of
from luceasync.server_config import ServerConfig
from tests.server.scripted import ScriptedEngine

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


def test_callers_share_only_with_equal_keys_and_equal_salts():
    # Such that one caller's key with its salt reads like another's; no key holds a NUL.
    texts = ["".join(chars) for size in range(5) for chars in product("a-", repeat=size)]
    callers = list(product(texts, [None, *texts[1:], "\0", "\0a", "a\0a"]))
    tenants = {Caller(key, may_salt=True).tenant(salt) for key, salt in callers}
    assert len(tenants) == len(callers)


def test_without_keys_all_callers_share_one_tenant():
    assert Caller().tenant(None) == ""


def test_an_untrusted_salt_is_refused_and_the_error_names_the_flag():
    with pytest.raises(RequestError, match="--trust-cache-salt") as caught:
        Caller("key").tenant("salt")
    assert caught.value.param == "cache_salt"


def test_a_key_is_never_shown():
    assert "sesame" not in repr(Caller("sesame"))


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer sch\u00fcssel".encode()}, "sch\u00fcssel"),
        ({"x-api-key": "two"}, "two"),
    ],
)
async def test_the_accepted_key_is_the_tenant(in_memory, headers, key):
    engine, config = ScriptedEngine(), ServerConfig(api_keys=("one", "sch\u00fcssel", "two"))
    async with in_memory(engine, config) as client:
        await client.post(CHAT, json=BODY, headers=headers)
    assert engine.requests[0].tenant == key


async def test_a_server_without_keys_ignores_the_header(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine) as client:
        await client.post(CHAT, json=BODY, headers={"Authorization": "Bearer mine"})
    assert engine.requests[0].tenant == ""


async def test_salts_are_accepted_only_if_trusted(in_memory):
    engine = ScriptedEngine()
    async with in_memory(engine, trust_cache_salt=True) as client:
        await client.post(CHAT, json=BODY | {"cache_salt": "a"})
    async with in_memory(ScriptedEngine()) as client:
        refused = await client.post(CHAT, json=BODY | {"cache_salt": "a"})
    assert engine.requests[0].tenant == Caller(may_salt=True).tenant("a")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_without_a_key_is_its_network(address, network):
    assert network_of(address) == network
    assert Caller(address=address).client == network


def test_a_client_with_a_key_is_its_key():
    assert Caller("key", address="192.0.2.7").client == "key"


def signed(name: str, secret: str = "one") -> str:
    return f"{name} {hmac.new(secret.encode(), name.encode(), 'sha256').hexdigest()}"


async def client_seen(in_memory, headers: dict[str, str], **config: object) -> str:
    engine = ScriptedEngine()
    async with in_memory(engine, ServerConfig(**config)) as client:
        response = await client.post(CHAT, json=BODY, headers=headers)
    assert response.status_code == 200, response.text
    return engine.requests[0].client


async def test_a_router_with_the_secret_names_its_clients(in_memory):
    secrets = {"client_secrets": ("two", "one")}
    for name in ("192.0.2.1", "192.0.2.2"):
        seen = await client_seen(in_memory, {"x-luceasync-client": signed(name)}, **secrets)
        assert seen.endswith(name)
        upper = signed(name).upper()
        assert await client_seen(in_memory, {"x-luceasync-client": upper}, **secrets) == seen
    key = {"authorization": "Bearer key"}
    headers = {"x-luceasync-client": signed("a"), **key}
    seen = await client_seen(in_memory, headers, api_keys=("key",), **secrets)
    assert seen not in ("a", "key") and seen.startswith("key") and seen.endswith("a")
    assert await client_seen(in_memory, key, api_keys=("key",), **secrets) == "key"


@pytest.mark.parametrize(
    "header", [signed("192.0.2.1", "other"), "192.0.2.1", signed("")[1:], signed("a" * 300)]
)
async def test_a_name_with_another_signature_is_refused(in_memory, header: str):
    config = ServerConfig(client_secrets=("one",))
    async with in_memory(ScriptedEngine(), config) as client:
        response = await client.post(CHAT, json=BODY, headers={"x-luceasync-client": header})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_client_signature"


async def test_without_a_secret_no_name_is_believed(in_memory):
    plain = await client_seen(in_memory, {})
    assert await client_seen(in_memory, {"x-luceasync-client": signed("192.0.2.1")}) == plain


async def test_the_client_is_the_peer_address_whatever_headers_say(in_memory):
    engine = ScriptedEngine()
    headers = {"x-forwarded-for": "198.51.100.1", "forwarded": "for=198.51.100.1"}
    async with in_memory(engine) as client:
        await client.post(CHAT, json=BODY, headers=headers)
    assert engine.requests[0].client == "127.0.0.1"
