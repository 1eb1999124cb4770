"""What is done for a cluster: starts and updates, one at a time; scaling; the router's list."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luceasync.cluster.decisions import (
    Leave,
    Phase,
    RayMachine,
    Replica,
    Scaling,
    Start,
    changes,
    manifest,
    server_words,
    shortfall,
)
from luceasync.cluster.settings import ClusterSettings, ScaleSettings, cluster_of


def settings_of(**replicas: dict[str, Any]) -> ClusterSettings:
    return cluster_of({"replicas": replicas}, Path("cluster.toml"))


TWO = settings_of(chat={"count": 2})
COUNTS = {"chat": 2}
TODAY = TWO.replicas[0].digest


def chat(number: int, phase: Phase = Phase.READY, digest: str = TODAY, **more: Any) -> Replica:
    return Replica("chat", number, digest, phase, f"http://box{number}:8000", **more)


def test_what_is_missing_starts() -> None:
    group = TWO.replicas[0]
    assert changes(TWO, COUNTS, []) == [Start(group, 0), Start(group, 1)]
    assert changes(TWO, COUNTS, [chat(0)]) == [Start(group, 1)]
    assert changes(TWO, COUNTS, [chat(0), chat(1)]) == []


def test_what_is_not_wanted_leaves_once() -> None:
    three = [chat(0), chat(1), chat(2)]
    assert [step.name for step in leaves(three)] == ["chat.2"]
    assert leaves([*three[:2], chat(2, Phase.LEAVING)]) == []
    other = replace(chat(0), group="gone")
    assert [step.name for step in leaves([other, *three[:2]])] == ["gone.0"]


def leaves(replicas: list[Replica]) -> list[Leave]:
    return [step for step in changes(TWO, COUNTS, replicas) if isinstance(step, Leave)]


def test_an_update_takes_one_server_at_a_time_while_all_others_serve() -> None:
    old = [chat(0, digest="old"), chat(1, digest="old")]
    assert [step.name for step in leaves(old)] == ["chat.0"]
    assert leaves([replace(old[0], phase=Phase.LEAVING), old[1]]) == []
    assert leaves([old[1]]) == [], "the first one has gone, and is to start"
    assert leaves([chat(0, Phase.STARTING), old[1]]) == []
    assert [step.name for step in leaves([chat(0), old[1]])] == ["chat.1"]


def test_a_server_that_does_not_serve_is_replaced_at_once() -> None:
    old = [chat(0, Phase.STARTING, "old"), chat(1, Phase.READY, "old")]
    assert [step.name for step in leaves(old)] == ["chat.0"]


def test_an_update_that_does_not_come_up_stops_there() -> None:
    broken = chat(0, Phase.STARTING, starts=5)
    assert leaves([broken, chat(1, digest="old")]) == []


def test_the_router_s_list_has_those_that_are_ready_in_an_order_that_stays() -> None:
    found = [chat(1), chat(2, Phase.LEAVING), chat(0), chat(3, Phase.AWAY), chat(4, Phase.STARTING)]
    expected = [{"url": "http://box0:8000"}, {"url": "http://box1:8000"}]
    assert json.loads(manifest(found)) == {"version": 1, "workers": expected}
    assert manifest(found) == manifest(found[::-1])


SCALE = ScaleSettings(1, 3, waiting=2.0, busy_s=10.0, idle_s=60.0)


def busy(number: int, waiting: int = 0, running: int = 0) -> Replica:
    return chat(number, waiting=waiting, running=running, lanes=4)


def counts(group: list[Replica], before: Scaling, *, seconds: int) -> list[int]:
    """The counts of so many seconds in which nothing else changes."""
    found = []
    for _ in range(seconds):
        before = before.after(1.0, SCALE, group)
        found.append(before.count)
    return found


def test_a_server_comes_when_requests_have_waited_long_enough_and_only_one() -> None:
    assert counts([busy(0, waiting=2)], Scaling(1), seconds=20) == [1] * 9 + [2] * 11
    assert counts([busy(0, waiting=1)], Scaling(1), seconds=60) == [1] * 60
    full = [busy(0, waiting=9), busy(1), busy(2)]
    assert counts(full, Scaling(3), seconds=60) == [3] * 60, "the most that there may be"


def test_a_server_leaves_when_the_others_have_had_room_for_all_for_long_enough() -> None:
    assert counts([busy(0, running=2), busy(1)], Scaling(2), seconds=60) == [2] * 59 + [1]
    assert counts([busy(0, running=2), busy(1, running=1)], Scaling(2), seconds=99) == [2] * 99
    assert counts([busy(0)], Scaling(1), seconds=99) == [1] * 99, "the least"


def test_a_pause_between_waiting_requests_begins_the_time_anew() -> None:
    nearly = Scaling(1, busy_s=9.5).after(1.0, SCALE, [busy(0)])
    assert nearly.busy_s == 0.0 and nearly.count == 1


def test_a_count_beyond_the_file_s_is_brought_within_it() -> None:
    assert Scaling(9).after(1.0, SCALE, []).count == 3
    assert Scaling(0).after(1.0, SCALE, []).count == 1


BOXES = [RayMachine("box1", {"CPU": 8.0, "GPU": 1.0}), RayMachine("box2", {"CPU": 8.0})]


@pytest.mark.parametrize(
    ("replicas", "words"),
    [
        ({"count": 2, "resources": {"CPU": 8}}, ""),
        ({"count": 1, "resources": {"GPU": 1}}, ""),
        (
            {"count": 1, "resources": {"GPU": 2}},
            "replicas.chat: GPU 2 on one machine is needed; box1 has GPU 1; box2 has GPU 0",
        ),
        (
            {"count": 2, "resources": {"GPU": 1}},
            "all replicas together need GPU 2; the machines have GPU 1",
        ),
        ({"scale": {"min": 1, "max": 9}, "resources": {"GPU": 1}}, ""),
        ({"count": 0, "resources": {"GPU": 5}}, ""),
    ],
)
def test_what_the_machines_lack_is_told_with_what_they_have(
    replicas: dict[str, Any], words: str
) -> None:
    assert shortfall(settings_of(chat=replicas), BOXES) == words


def with_stages(**more: Any) -> ClusterSettings:
    stages = [{"devices": ["cpu"]}, {"devices": ["cuda:0", "cpu"], "resources": {"GPU": 1}}]
    found = {"devices": ["cpu"], "stages": stages, "tls": "/etc/m.pem", **more}
    return settings_of(chat=found)


def test_stages_that_are_spread_need_as_many_machines() -> None:
    words = "replicas.chat: spread over 3 machines; there are 2"
    assert shortfall(with_stages(spread=True), BOXES) == words
    assert shortfall(with_stages(), BOXES) == ""


def test_a_server_is_told_its_address_its_stages_and_the_file_s_flags() -> None:
    [group] = with_stages(model="/srv/m", flags=["--parallel", "2"], **{"drain-s": 9}).replicas
    words = server_words(group, 1, "10.0.0.2", 8001, "10.0.0.1:6379", "home.chat.1.abc")
    assert words[:4] == ["serve", "/srv/m", "--host", "10.0.0.2"]
    text = " ".join(words)
    assert "--port 8001 --graceful-timeout 9 --parallel 2" in text
    assert "cpu@stage1=ray://10.0.0.1:6379/home.chat.1.abc/1" in text
    assert "cuda@stage2=ray://10.0.0.1:6379/home.chat.1.abc/2" in text
    assert words[-1] == "cpu,stage1/cpu,stage2/cuda:0,stage2/cpu"
