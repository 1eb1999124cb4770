"""The manager's looks at a cluster, on a Ray that a test plays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from luceasync.cluster import manager
from luceasync.cluster.manager import ClusterKeeper, write_whole
from luceasync.cluster.replica import ReplicaState
from luceasync.cluster.settings import cluster_of


class RayFault(Exception):
    """Ray's word for an actor that is gone."""


class PlayedActor:
    """A server's actor: its state is what the test says; None: it does not answer."""

    def __init__(self, settings: bytes, number: int, ray: str, group: str) -> None:
        self.place = group
        self.told: ReplicaState | Exception | None = None
        self.is_drained: bool | None = None
        self.state = SimpleNamespace(remote=lambda: ("state", self))
        self.drain = SimpleNamespace(remote=self._drain)

    def _drain(self) -> tuple[str, PlayedActor]:
        self.is_drained = False
        return "drain", self


class PlayedRay:
    """As much of Ray as a ClusterKeeper asks for."""

    def __init__(self) -> None:
        self.actors: dict[str, PlayedActor] = {}
        self.places: dict[str, list[dict[str, float]]] = {}
        self.exceptions = SimpleNamespace(RayError=RayFault)
        strategy = SimpleNamespace(PlacementGroupSchedulingStrategy=lambda *words: words)
        self.util = SimpleNamespace(
            list_named_actors=lambda: ["cluster/manager", "other/chat.0", *self.actors],
            placement_group=self._reserve,
            get_placement_group=self._place,
            remove_placement_group=self.places.pop,
            placement_group_table=lambda: {
                name: {"name": name, "state": "CREATED"} for name in self.places
            },
            scheduling_strategies=strategy,
        )

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._new(options)))

    def _new(self, options: dict[str, Any]) -> Any:
        def start(*words: Any) -> None:
            self.actors[options["name"]] = PlayedActor(*words)

        return start

    def _reserve(self, bundles: Any, strategy: str, name: str, lifetime: str) -> str:
        self.places[name] = bundles
        return name

    def _place(self, name: str) -> str:
        if name not in self.places:
            raise ValueError(name)
        return name

    def get_actor(self, name: str, namespace: str) -> PlayedActor:
        return self.actors[name]

    def wait(self, calls: list[Any], timeout: float, num_returns: int = 1) -> Any:
        done = [call for call in calls if self._is_done(call)]
        return done, [call for call in calls if call not in done]

    @staticmethod
    def _is_done(call: tuple[str, PlayedActor]) -> bool:
        kind, actor = call
        return actor.told is not None if kind == "state" else bool(actor.is_drained)

    def get(self, call: tuple[str, PlayedActor]) -> bytes:
        told = call[1].told
        if isinstance(told, Exception):
            raise told
        return msgspec.json.encode(told)

    def kill(self, actor: PlayedActor) -> None:
        self.actors = {name: each for name, each in self.actors.items() if each is not actor}


class Played:
    """A keeper of two servers, and what the test does to them."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "servers.json"
        self.ray = PlayedRay()
        self.keeper = self.keep([])

    def keep(self, flags: list[str]) -> ClusterKeeper:
        """A new manager, with these flags of the servers."""
        found = {"name": "cluster", "servers-file": "servers.json"}
        table = {**found, "replicas": {"chat": {"count": 2, "flags": flags}}}
        settings = cluster_of(table, self.file.with_name("cluster.toml"))
        self.keeper = ClusterKeeper(settings, self.ray, "10.0.0.1:6379")
        self.digest = settings.replicas[0].digest
        return self.keeper

    def tell(self, number: int, told: ReplicaState | Exception | None) -> PlayedActor:
        actor = self.ray.actors[f"cluster/chat.{number}"]
        actor.told = told
        return actor

    def ready(self, number: int, **more: Any) -> ReplicaState:
        url = f"http://box{number}:8000"
        return ReplicaState(self.digest, url, "box", is_ready=True, was_ready=True, **more)

    def serve(self) -> None:
        """Both come up."""
        self.keeper.look(1.0)
        for number in (0, 1):
            self.tell(number, self.ready(number))
        self.keeper.look(1.0)

    @property
    def listed(self) -> list[str]:
        return [each["url"][-6:-5] for each in json.loads(self.file.read_text())["workers"]]

    @property
    def phases(self) -> dict[str, str]:
        return {each["name"]: str(each["phase"]) for each in self.keeper.status.replicas}


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(manager, "SETTLE_S", 0.0)
    return Played(tmp_path)


def test_servers_are_started_each_with_what_is_reserved_for_it_and_listed_once_ready(
    played: Played,
) -> None:
    played.keeper.look(1.0)
    assert {*played.ray.actors} == {"cluster/chat.0", "cluster/chat.1"}
    assert {*played.ray.places} == {actor.place for actor in played.ray.actors.values()}
    assert played.listed == [] and not played.keeper.status.is_settled
    played.serve()
    assert played.listed == ["0", "1"] and played.keeper.status.is_settled


@pytest.mark.parametrize("told", [None, RayFault("the node has died")])
def test_a_server_that_does_not_answer_is_away_and_not_listed_until_it_does(
    played: Played, told: Exception | None
) -> None:
    played.serve()
    actor = played.tell(1, told)
    played.keeper.look(1.0)
    assert played.listed == ["0"]
    assert played.phases == {"chat.0": "ready", "chat.1": "away"}
    assert {*played.ray.actors} == {"cluster/chat.0", "cluster/chat.1"}, "Ray moves it"
    actor.told = played.ready(1)
    played.keeper.look(1.0)
    assert played.listed == ["0", "1"]


def test_an_update_takes_a_server_off_the_list_before_it_drains_it_and_then_the_next(
    played: Played,
) -> None:
    played.serve()
    before = dict(played.ray.actors)
    played.keep(["--parallel", "2"])
    played.keeper.look(1.0)
    first, second = before["cluster/chat.0"], before["cluster/chat.1"]
    assert played.listed == ["1"] and first.is_drained is False and second.is_drained is None
    played.keeper.look(1.0)
    assert played.ray.actors["cluster/chat.0"] is first, "it finishes what it runs"
    first.is_drained = True
    played.keeper.look(1.0)
    assert [*played.ray.actors] == ["cluster/chat.1"]
    played.keeper.look(1.0)
    assert played.ray.actors["cluster/chat.0"].place != first.place
    assert second.is_drained is None, "the new one is not ready"
    played.tell(0, played.ready(0))
    played.keeper.look(1.0)
    assert played.listed == ["0"] and second.is_drained is False


def test_a_list_that_cannot_be_written_ends_no_server_that_is_still_in_it(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    played.serve()
    actor = played.ray.actors["cluster/chat.0"]
    played.keep(["--parallel", "2"])

    def fail(file: Path, text: str) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(manager, "write_whole", fail)
        for _ in range(3):
            with pytest.raises(OSError):
                played.keeper.look(1.0)
    assert played.listed == ["0", "1"] and actor.is_drained is None
    assert played.phases == {"chat.0": "leaving", "chat.1": "ready"}
    played.keeper.look(1.0)
    assert played.listed == ["1"] and actor.is_drained is False


def test_a_new_manager_goes_on_with_a_server_that_was_leaving(played: Played) -> None:
    played.serve()
    actor = played.tell(1, played.ready(1, is_leaving=True))
    played.keep([])
    played.keeper.look(1.0)
    assert played.listed == ["0"] and actor.is_drained is False
    actor.is_drained = True
    played.keeper.look(1.0)
    assert [*played.ray.actors] == ["cluster/chat.0"]


def test_the_end_leaves_nothing_reserved_and_an_empty_list(played: Played) -> None:
    played.serve()
    played.keeper.is_ending = True
    played.keeper.look(1.0)
    for actor in played.ray.actors.values():
        actor.is_drained = True
    played.keeper.look(1.0)
    played.keeper.look(1.0)
    assert not played.ray.actors and not played.ray.places
    assert played.listed == [] and played.keeper.status.replicas == []


def test_the_list_is_replaced_whole_and_leaves_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    write_whole(file, "one")
    write_whole(file, "two")
    assert file.read_text() == "two" and [*tmp_path.iterdir()] == [file]
