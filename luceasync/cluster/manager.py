"""Keeps a Ray cluster's servers as cluster.toml says: an actor of Ray that looks once a second.

Owns the router's list. What there is, it learns from Ray's names and the servers' actors each time,
so that it may be replaced, or moved by Ray, at any moment. Decides nothing: see decisions.py.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from luceasync.cluster.decisions import (
    Leave,
    Phase,
    Replica,
    Scaling,
    Start,
    changes,
    manifest,
)
from luceasync.cluster.replica import END_S, ReplicaActor, ReplicaState
from luceasync.cluster.settings import ClusterSettings, ReplicaSettings
from luceasync.ipc.ray_launcher import NAMESPACE, resource_options

LOOK_S = 1.0
STATE_S = 3.0  # for the answers of all servers' actors
SETTLE_S = 2.0  # until the router has read that a server is not in its list any more
MOST_DRAIN_S = 600.0  # of servers whose settings are gone
THREADS = 8  # of an actor: it is asked while it drains

log = logging.getLogger(__name__)


def actor_name(cluster: str, name: str) -> str:
    """Ray's name of a server's actor, and of its placement group."""
    return f"{cluster}/{name}"


def manager_name(cluster: str) -> str:
    """Ray's name of the manager."""
    return f"{cluster}/manager"


@dataclass
class _Known:
    """What is remembered of a server between two looks; without it, it is found out again."""

    leaving_s: float | None = None  # when it was taken off the list
    asked: Any = None  # a call of Ray that is under way
    draining: Any = None  # another
    state: ReplicaState | None = None


class ManagerStatus(msgspec.Struct, frozen=True):
    """What `luceasync cluster status` shows. `replicas`: see Replica; `fault`: what kept the
    manager from doing all that it wanted when it looked last.
    """

    counts: dict[str, int]
    replicas: list[dict[str, Any]]
    is_settled: bool
    fault: str = ""


@dataclass
class ClusterKeeper:
    """The work of the manager. Called by one thread; `status` by any."""

    settings: ClusterSettings
    ray: Any
    ray_address: str
    known: dict[str, _Known] = field(default_factory=dict)
    scaling: dict[str, Scaling] = field(default_factory=dict)
    status: ManagerStatus = field(default_factory=lambda: ManagerStatus({}, [], False))
    is_ending: bool = False
    _written: str | None = None
    _requested: list[dict[str, float]] | None = None

    def look(self, passed_s: float) -> None:
        """Find out what there is, and do what is to be done."""
        replicas = self._replicas()
        counts = self._counts(replicas, passed_s)
        steps = changes(self.settings, counts, replicas)
        for step in steps:
            match step:
                case Start(group, number):
                    self._start(group, number)
                case Leave(name, why):
                    log.info("%s leaves: %s", name, why)
                    self.known[name].leaving_s = time.monotonic()
        left = {name for name, known in self.known.items() if known.leaving_s is not None}
        replicas = [replace(e, phase=Phase.LEAVING) if e.name in left else e for e in replicas]
        is_settled = not steps and all(each.phase is Phase.READY for each in replicas)
        shown = [msgspec.to_builtins(each) | {"name": each.name} for each in replicas]
        self.status = ManagerStatus(dict(counts), shown, is_settled)
        self._write(manifest(replicas))
        self._go_on_leaving()

    # --- what there is ----------------------------------------------------------------------------

    def _replicas(self) -> list[Replica]:
        """All servers of this cluster, as their actors say within STATE_S."""
        prefix = actor_name(self.settings.name, "")
        manager = manager_name(self.settings.name)
        found = [name for name in self.ray.util.list_named_actors() if name != manager]
        names = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
        self.known = {name: self.known.get(name, _Known()) for name in names}
        for name, known in self.known.items():
            if known.asked is None:  # else it has not answered yet what it was asked before
                known.asked = self._actor(name).state.remote()
        asked = [known.asked for known in self.known.values()]
        answered = self.ray.wait(asked, num_returns=len(asked), timeout=STATE_S)[0] if asked else []
        return [
            self._replica(name, known, has_answered=known.asked in answered)
            for name, known in self.known.items()
        ]

    def _replica(self, name: str, known: _Known, *, has_answered: bool) -> Replica:
        is_there, detail = False, "its machine does not answer"
        if has_answered:
            answer, known.asked = known.asked, None
            try:
                known.state = msgspec.json.decode(self.ray.get(answer), type=ReplicaState)
                is_there, detail = True, known.state.detail
            except self.ray.exceptions.RayError as error:  # its machine has gone: Ray restarts it
                detail = " ".join(str(error).split())[:200]
        group, _, number = name.rpartition(".")
        settings = self.settings.of(group)
        today = "" if settings is None else settings.digest  # of one that has not answered yet
        state = known.state or ReplicaState(today, "", "")
        if state.is_leaving and known.leaving_s is None:  # the manager before this one began it
            known.leaving_s = time.monotonic()
        return Replica(
            group=group,
            number=int(number),
            digest=state.digest,
            phase=_phase(state, known, is_there=is_there),
            url=state.url,
            node=state.node,
            running=state.running,
            waiting=state.waiting,
            lanes=state.lanes,
            starts=state.starts,
            status=state.status,
            detail=detail,
        )

    def _counts(self, replicas: list[Replica], passed_s: float) -> Mapping[str, int]:
        if self.is_ending:
            return {group.name: 0 for group in self.settings.replicas}
        for group in self.settings.replicas:
            own = [each for each in replicas if each.group == group.name]
            before = self.scaling.get(group.name, Scaling(len(own)))
            self.scaling[group.name] = before.after(passed_s, group.scale, own)
        counts = {name: scaling.count for name, scaling in self.scaling.items()}
        self._request(counts)
        return counts

    def _request(self, counts: Mapping[str, int]) -> None:
        """Tell Ray's autoscaler, if it has one, for what there must be machines."""
        groups = self.settings.replicas
        bundles = [b for group in groups for b in group.bundles * counts[group.name]]
        if all(group.scale.is_fixed for group in groups) or bundles == self._requested:
            return
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=bundles)
        self._requested = bundles

    # --- what is done -----------------------------------------------------------------------------

    def _start(self, group: ReplicaSettings, number: int) -> None:
        """Reserve its resources, and start its actor there as soon as Ray has them."""
        strategies = self.ray.util.scheduling_strategies
        name = actor_name(self.settings.name, f"{group.name}.{number}")
        place = f"{place_prefix(name)}{group.digest}"
        reserved = self._place(place)
        if reserved is None:
            strategy = "STRICT_SPREAD" if group.spread else "PACK"
            reserved = self.ray.util.placement_group(
                group.bundles, strategy, name=place, lifetime="detached"
            )
        options = resource_options(group.resources)
        self.ray.remote(ReplicaActor).options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=THREADS,
            scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(reserved, 0),
            **options,
        ).remote(msgspec.json.encode(group), number, self.ray_address, place)
        log.info("%s.%d starts", group.name, number)

    def _go_on_leaving(self) -> None:
        """Drain servers that are off the list for SETTLE_S, and remove those that have ended."""
        now_s = time.monotonic()
        for name, known in self.known.items():
            if known.leaving_s is None or now_s - known.leaving_s < SETTLE_S:
                continue
            if known.draining is None:
                known.draining = self._actor(name).drain.remote()
                continue
            is_over, _ = self.ray.wait([known.draining], timeout=0)
            drain_s = self._drain_s(name)
            if is_over or now_s - known.leaving_s > SETTLE_S + drain_s + 2 * END_S:
                self._remove(name)

    def _drain_s(self, name: str) -> float:
        settings = self.settings.of(name.rpartition(".")[0])
        return MOST_DRAIN_S if settings is None else settings.drain_s

    def _remove(self, name: str) -> None:
        self.ray.kill(self._actor(name))
        remove_places(self.ray, place_prefix(actor_name(self.settings.name, name)))
        log.info("%s has left", name)

    def _place(self, name: str) -> Any:
        """The placement group of that name, after a start that failed halfway; None: none."""
        try:
            return self.ray.util.get_placement_group(name)
        except ValueError:
            return None

    def _actor(self, name: str) -> Any:
        return self.ray.get_actor(actor_name(self.settings.name, name), namespace=NAMESPACE)

    def _write(self, text: str) -> None:
        """The router's list, whole or not at all."""
        file = self.settings.servers_file
        if file is None or text == self._written:
            return
        write_whole(Path(file), text)
        self._written = text


def write_whole(file: Path, text: str) -> None:
    """Replace a file, so that readers see the old text or the new one. Raises OSError."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def place_prefix(name: str) -> str:
    """What the names of its placement groups begin with; without slashes, for URLs."""
    return f"{name.replace('/', '.')}."


def remove_places(ray: Any, prefix: str) -> None:
    """Free what is reserved under names that begin so."""
    for place in ray.util.placement_group_table().values():
        if place["name"].startswith(prefix) and place["state"] != "REMOVED":
            with contextlib.suppress(ValueError):  # it has gone meanwhile
                ray.util.remove_placement_group(ray.util.get_placement_group(place["name"]))


def _phase(state: ReplicaState, known: _Known, *, is_there: bool) -> Phase:
    if known.leaving_s is not None or state.is_leaving:
        return Phase.LEAVING
    if is_there and state.is_ready:
        return Phase.READY
    return Phase.AWAY if state.was_ready else Phase.STARTING


class ManagerActor:
    """What Ray runs: a ClusterKeeper, and a thread that has it look."""

    def __init__(self, settings: bytes, ray_address: str) -> None:
        """`settings`: a ClusterSettings as JSON."""
        import ray

        logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
        read = msgspec.json.decode(settings, type=ClusterSettings)
        self._keeper = ClusterKeeper(read, ray, ray_address)
        self._is_over = threading.Event()
        self._fault = ""
        self._looking = threading.Thread(target=self._look, name="looks", daemon=True)
        self._looking.start()

    def status(self) -> bytes:
        """A ManagerStatus as JSON."""
        is_settled = self._keeper.status.is_settled and not self._fault
        found = msgspec.structs.replace(self._keeper.status, is_settled=is_settled)
        return msgspec.json.encode(msgspec.structs.replace(found, fault=self._fault))

    def end(self) -> None:
        """Have all servers finish what they run, and leave."""
        self._keeper.is_ending = True

    def stop(self) -> None:
        """Leave everything as it is."""
        self._is_over.set()
        self._looking.join(END_S)

    def _look(self) -> None:
        before_s = time.monotonic()
        while not self._is_over.wait(LOOK_S):
            now_s = time.monotonic()
            try:
                self._keeper.look(now_s - before_s)
                self._fault = ""
            except Exception as error:  # of Ray or the disk, of many kinds: told, and tried again
                self._fault = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                log.warning("%s", self._fault)
            before_s = now_s
