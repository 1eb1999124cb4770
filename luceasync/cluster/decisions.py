"""What is to be done for a cluster: which servers start and leave, how many, and what routers read.

Pure. Knows neither Ray nor the clock: callers say what there is and how much time has passed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from luceasync.cluster.settings import ClusterSettings, ReplicaSettings, Resources, ScaleSettings


class Phase(StrEnum):
    """Where a server is in its life. READY ones alone are in the router's list."""

    STARTING = "starting"
    READY = "ready"
    AWAY = "away"  # it was ready, and does not answer, or is not ready now
    LEAVING = "leaving"  # it gets nothing new, and finishes what it runs


@dataclass(frozen=True, slots=True)
class Replica:
    """A server as its cluster sees it. `digest`: of the settings that it was started with."""

    group: str
    number: int
    digest: str
    phase: Phase
    url: str = ""
    node: str = ""
    running: int = 0
    waiting: int = 0
    lanes: int = 0
    starts: int = 0
    status: int | None = None  # with which its process ended last
    detail: str = ""

    @property
    def name(self) -> str:
        return f"{self.group}.{self.number}"


@dataclass(frozen=True, slots=True)
class Start:
    """Start a server."""

    settings: ReplicaSettings
    number: int


@dataclass(frozen=True, slots=True)
class Leave:
    """Have a server finish what it runs, and end it."""

    name: str
    why: str


def changes(
    settings: ClusterSettings, counts: Mapping[str, int], replicas: Iterable[Replica]
) -> list[Start | Leave]:
    """What to do now, so that in the end there are `counts` servers of each group, with the
    settings of today. Of those that serve, one at a time is replaced, while all others of its group
    serve.
    """
    found = {each.name: each for each in replicas}
    steps: list[Start | Leave] = []
    for name, each in sorted(found.items()):
        group = settings.of(each.group)
        is_wanted = group is not None and each.number < counts.get(each.group, 0)
        if not is_wanted and each.phase is not Phase.LEAVING:
            steps.append(Leave(name, "it is not wanted any more"))
    for group in settings.replicas:
        own = [found.get(f"{group.name}.{number}") for number in range(counts[group.name])]
        steps += [Start(group, number) for number, each in enumerate(own) if each is None]
        there = [each for each in own if each is not None]
        old = [e for e in there if e.digest != group.digest and e.phase is not Phase.LEAVING]
        useless = [each for each in old if each.phase is not Phase.READY]
        others_serve = len(there) == len(own) and all(e.phase is Phase.READY for e in there)
        leaves = useless or (old[:1] if others_serve else [])
        steps += [Leave(each.name, "its settings have changed") for each in leaves]
    return steps


MOST_FILLED = 0.5  # of the lanes that remain when a server leaves


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many servers a group has, and for how long that has been too few, or too many."""

    count: int
    busy_s: float = 0.0
    idle_s: float = 0.0

    def after(self, passed_s: float, scale: ScaleSettings, group: Sequence[Replica]) -> Scaling:
        """A moment later. The count changes by one at a time, and only while all that it has are
        ready: one that starts will take requests of the others.
        """
        count = min(max(self.count, scale.least), scale.most)
        ready = [each for each in group if each.phase is Phase.READY]
        if scale.is_fixed or len(ready) != count:
            return Scaling(count)
        waiting = sum(each.waiting for each in ready)
        others = sum(sorted(each.lanes for each in ready)[: count - 1])
        is_busy = waiting >= scale.waiting * count
        is_idle = waiting == 0 and sum(each.running for each in ready) <= others * MOST_FILLED
        busy_s = self.busy_s + passed_s if is_busy else 0.0
        idle_s = self.idle_s + passed_s if is_idle else 0.0
        if busy_s >= scale.busy_s and count < scale.most:
            return Scaling(count + 1)
        if idle_s >= scale.idle_s and count > scale.least:
            return Scaling(count - 1)
        return replace(self, count=count, busy_s=busy_s, idle_s=idle_s)


def manifest(replicas: Iterable[Replica]) -> str:
    """The list of servers that smg reads with `--discovery-provider file`."""
    urls = sorted(each.url for each in replicas if each.phase is Phase.READY)
    return json.dumps({"version": 1, "workers": [{"url": url} for url in urls]}, indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class RayMachine:
    """A living node of a Ray cluster, and all that it has."""

    name: str
    resources: Resources


def shortfall(settings: ClusterSettings, machines: Sequence[RayMachine]) -> str:
    """What the cluster lacks for the replicas that must run at once, what is asked and what is
    there, in one line; empty: nothing, as far as sums and single machines tell.
    """
    for group in settings.replicas:
        for bundle in group.bundles if group.scale.least else ():
            words = _unfit(bundle, machines)
            if words:
                return f"replicas.{group.name}: {words}"
        if group.spread and len(group.bundles) > len(machines):
            return (
                f"replicas.{group.name}: spread over {len(group.bundles)} machines; "
                f"there are {len(machines)}"
            )
    asked: dict[str, float] = {}
    for group in settings.replicas:
        for bundle in group.bundles * group.scale.least:
            for name, amount in bundle.items():
                asked[name] = asked.get(name, 0.0) + amount
    for name, amount in sorted(asked.items()):
        there = sum(machine.resources.get(name, 0.0) for machine in machines)
        if amount > there:
            return (
                f"all replicas together need {name} {amount:g}; the machines have {name} {there:g}"
            )
    return ""


def _unfit(bundle: Resources, machines: Sequence[RayMachine]) -> str:
    """Why no machine has all of it; empty: one does."""
    if any(
        all(machine.resources.get(name, 0.0) >= amount for name, amount in bundle.items())
        for machine in machines
    ):
        return ""
    asked = ", ".join(f"{name} {amount:g}" for name, amount in sorted(bundle.items()))
    names = sorted(bundle)
    there = "; ".join(
        f"{machine.name} has "
        + ", ".join(f"{name} {machine.resources.get(name, 0.0):g}" for name in names)
        for machine in machines[:4]
    )
    more = f"; {len(machines) - 4} more" if len(machines) > 4 else ""
    return f"{asked} on one machine is needed; {there or 'there is none'}{more}"


def server_words(
    settings: ReplicaSettings, number: int, host: str, port: int, ray: str, group: str
) -> list[str]:
    """The arguments of `luceasync` for one server. `group`: the placement group that Ray has
    reserved for it, whose further bundles are its stages'.
    """
    words = ["serve", *([settings.model] if settings.model else [])]
    words += ["--host", host, "--port", str(port)]
    words += ["--graceful-timeout", f"{settings.drain_s:g}", *settings.flags]
    devices = list(settings.devices)
    for index, stage in enumerate(settings.stages, start=1):
        machine = f"stage{index}"
        devices += [f"{machine}/{device}" for device in stage.devices]
        for backend in sorted({device.partition(":")[0] for device in stage.devices}):
            url = f"ray://{ray}/{group}/{index}"
            words += ["--target-shard-ipc-bin", f"{backend}@{machine}={url}"]
    if settings.stages:
        words += ["--target-shard-tls", str(settings.tls)]
    if devices:
        words += ["--target-devices", ",".join(devices)]
    return words
