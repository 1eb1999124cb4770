"""What `luceasync cluster` does: puts a manager on a Ray cluster, asks it, and ends all again.

Owns the connection to Ray of a command. Prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from luceasync.cluster.decisions import Phase, RayMachine, manifest, shortfall
from luceasync.cluster.manager import (
    ManagerActor,
    ManagerStatus,
    actor_name,
    manager_name,
    place_prefix,
    remove_places,
    write_whole,
)
from luceasync.cluster.replica import END_S, EXIT_USAGE
from luceasync.cluster.settings import ClusterSettings
from luceasync.errors import ConfigError, Unavailable
from luceasync.ipc.ray_launcher import NAMESPACE, connect_ray

ANSWER_S = 30.0
POLL_S = 0.5
BROKEN_STARTS = 3  # of a server that ends each time: what it says is the answer
COMMAND = "luceasync cluster"

Shows = Callable[[ManagerStatus], None]


@contextmanager
def connected(settings: ClusterSettings) -> Iterator[Control]:
    """A connection to the file's Ray cluster. Raises ConfigError."""
    ray = connect_ray(settings.ray, COMMAND)
    try:
        yield Control(settings, ray)
    finally:
        ray.shutdown()


class Control:
    """The commands, on a connection. All raise Unavailable if Ray or the manager do not answer."""

    def __init__(self, settings: ClusterSettings, ray: Any) -> None:
        self._settings, self._ray = settings, ray

    def up(self, shows: Shows, deadline_s: float) -> ManagerStatus:
        """Have the cluster be as the file says: what runs is replaced where its settings differ.
        Wait until it is so, and show each change. Raises ConfigError if the cluster lacks what is
        asked, or a server refuses its settings.
        """
        self.start()
        return self._wait(_is_up, shows, deadline_s)

    def start(self) -> None:
        """The same without waiting."""
        lacking = shortfall(self._settings, self._machines())
        if lacking:
            raise ConfigError(f"{lacking} (Ray at {self._address})")
        self._replace_manager()

    def status(self) -> ManagerStatus:
        """What there is. Raises ConfigError if nothing runs."""
        manager = self._manager()
        if manager is None:
            raise ConfigError(
                f"no cluster {self._settings.name} runs on Ray at {self._address}; "
                "`luceasync cluster up` starts one"
            )
        return self._status_of(manager)

    def down(self, shows: Shows, deadline_s: float) -> None:
        """Have all servers finish what they run, and leave nothing. Idempotent."""
        manager = self._manager()
        if manager is not None:
            self._answer(manager.end.remote())
            self._wait(lambda status: not status.replicas, shows, deadline_s)
            self._kill(manager)
        for name in self._ray.util.list_named_actors():  # of a manager that was lost
            if name.startswith(actor_name(self._settings.name, "")):
                with suppress(ValueError):  # it has just ended
                    self._kill(self._ray.get_actor(name, namespace=NAMESPACE))
        remove_places(self._ray, place_prefix(self._settings.name))
        if self._settings.servers_file is not None:
            write_whole(Path(self._settings.servers_file), manifest([]))

    @property
    def _address(self) -> str:
        return str(self._ray.get_runtime_context().gcs_address)

    def _machines(self) -> list[RayMachine]:
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return [RayMachine(node["NodeManagerAddress"], node["Resources"]) for node in alive]

    def _manager(self) -> Any:
        try:
            return self._ray.get_actor(manager_name(self._settings.name), namespace=NAMESPACE)
        except ValueError:
            return None

    def _replace_manager(self) -> None:
        """Start a manager with the file's settings, in the place of the one before."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        before = self._manager()
        if before is not None:
            with suppress(Unavailable):  # it hangs, and is killed all the same
                self._answer(before.stop.remote())
            self._kill(before)
        # On this machine, where the router's list is to be. With soft affinity Ray may restart it
        # on another one although this one is alive, and the list here would stay as it is.
        node = self._ray.get_runtime_context().get_node_id()
        options = {
            "name": manager_name(self._settings.name),
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "max_concurrency": 4,
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
        }
        told = msgspec.json.encode(self._settings)
        until_s = time.monotonic() + ANSWER_S
        while True:
            try:
                self._ray.remote(ManagerActor).options(**options).remote(told, self._address)
                return
            except ValueError as error:  # the name of the one before is not free yet
                if time.monotonic() > until_s:
                    raise Unavailable(f"Ray: {error}") from error
                time.sleep(POLL_S)

    def _kill(self, actor: Any) -> None:
        self._ray.kill(actor)

    def _wait(
        self, is_over: Callable[[ManagerStatus], bool], shows: Shows, deadline_s: float
    ) -> ManagerStatus:
        """Wait until the manager says so. Raises ConfigError, Unavailable."""
        until_s, shown = time.monotonic() + deadline_s, None
        while True:
            manager = self._manager()
            status = self._status_of(manager)
            if status != shown:
                shows(status)
                shown = status
            if is_over(status):
                return status
            if time.monotonic() > until_s:
                words = f"not within {deadline_s:g} s; it goes on: see cluster status"
                raise Unavailable(f"{words}; {status.fault}" if status.fault else words)
            time.sleep(POLL_S)

    def _status_of(self, manager: Any) -> ManagerStatus:
        return msgspec.json.decode(self._answer(manager.status.remote()), type=ManagerStatus)

    def _answer(self, call: Any) -> Any:
        """Raises Unavailable."""
        try:
            return self._ray.get(call, timeout=ANSWER_S + END_S)
        except self._ray.exceptions.RayTaskError as error:
            raise Unavailable(f"the manager: {error.cause}") from None
        except self._ray.exceptions.RayError as error:
            raise Unavailable(f"the manager does not answer: {error}") from None


def _is_up(status: ManagerStatus) -> bool:
    """Whether all is as it was asked for. Raises ConfigError if a server refuses its settings, or
    ends each time it is started.
    """
    for each in status.replicas:
        is_refused = each["status"] == EXIT_USAGE
        if each["phase"] == Phase.STARTING and (is_refused or each["starts"] > BROKEN_STARTS):
            raise ConfigError(f"{each['name']} on {each['node']}: {each['detail']}")
    return status.is_settled
