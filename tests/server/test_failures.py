"""A client learns what is wrong, but not where files are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.errors import GenerationFailed, Unavailable
from luceasync.server.failures import redact_paths
from luceasync.status import CacheStatus
from tests.server.scripted import ScriptedEngine


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", ""),
        ("the disk is full", "the disk is full"),
        ("[Errno 5] I/O error: '/home/me/my cache/ab.safetensors'",
         "[Errno 5] I/O error: 'ab.safetensors'"),
        ("[Errno 13] Permission denied: '/cache'", "[Errno 13] Permission denied: 'cache'"),
        ("'/a/b' -> '/a/c/'", "'b' -> 'c'"),
        ('cannot open "/home/o\'neil/x"', 'cannot open "x"'),
        ("/models/q/config.json is not JSON: line 1", "config.json is not JSON: line 1"),
        ("--kv-cache-dir /home/me: full; 1/2 is", "--kv-cache-dir me: full; 1/2 is"),
        ("see http://a/b, 3 tokens/s and a/b", "see http://a/b, 3 tokens/s and a/b"),
    ],
)  # fmt: skip
def test_an_absolute_path_is_reduced_to_its_last_name(words, told):
    assert redact_paths(words) == told


SECRET = "[Errno 5] I/O error: '/home/me/cache/ab.safetensors'"


class FailedEngine(ScriptedEngine):
    """Not ready, with a path in its detail."""

    def status(self):
        return replace(super().status(), ready=False, detail=f"failed: {SECRET}")


async def test_no_page_and_no_error_contains_a_path(in_memory):
    degraded = ScriptedEngine()
    degraded.cache = CacheStatus(degraded=SECRET)
    answers = []
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    for engine in (
        degraded,
        FailedEngine(),
        ScriptedEngine(opening=Unavailable(SECRET)),
        ScriptedEngine(opening=GenerationFailed(SECRET)),
        ScriptedEngine([GenerationFailed(SECRET)]),
    ):
        async with in_memory(engine) as client:
            answers += [await client.get(path) for path in ("/health", "/ready", "/metrics")]
            for stream in (False, True):
                answers.append(
                    await client.post("/v1/chat/completions", json=body | {"stream": stream})
                )
    assert not [answer.text for answer in answers if "/home" in answer.text]
    assert len([answer for answer in answers if "ab.safetensors" in answer.text]) >= 11
