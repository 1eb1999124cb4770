"""cluster.toml: the servers of a Ray cluster, their resources, and the file that lists them.

Owns the file's keys and what they may be. Knows no Ray.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from luceasync import __version__, parsers
from luceasync.errors import ConfigError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?")
RESOURCE = re.compile(r"[A-Za-z][\w:.-]*")
DEVICE = re.compile(r"(cpu|cuda|hip)(:\d+)?")
MAX_COUNT = 1000
# Flags that follow from the file, and those whose values others could read in a list of processes.
OWN_FLAGS = ("--host", "--port", "--graceful-timeout", "--config")
STAGE_FLAGS = ("--target-devices", "--target-device", "--target-shard-tls")
TLS_FLAGS = ("--tls-cert", "--tls-key")
SECRET_FLAGS = ("--api-key", "--admin-key")

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StageSettings:
    """The last layers of a model, on devices of another process. `resources`: what Ray reserves."""

    devices: tuple[str, ...]
    resources: Resources


@dataclass(frozen=True, slots=True)
class ScaleSettings:
    """How many replicas there are. One is added when `waiting` requests a replica have waited for
    `busy_s`, and one taken away when half of the others' lanes could have run all for `idle_s`.
    """

    least: int
    most: int
    waiting: float = 2.0
    busy_s: float = 10.0
    idle_s: float = 300.0

    @property
    def is_fixed(self) -> bool:
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Servers that are alike. `model` None: the bundled one; `port` 0: any free one, else the first
    one's; `tls`: a machine's file of `luceasync pair`, at the same path on every machine;
    `environment_file`: variables of the server, on its machine; `spread`: stages run on machines of
    their own.
    """

    name: str
    scale: ScaleSettings
    model: str | None = None
    devices: tuple[str, ...] = ()
    resources: Resources = field(default_factory=lambda: {"CPU": 1.0})
    flags: tuple[str, ...] = ()
    port: int = 0
    drain_s: float = 60.0
    environment_file: str | None = None
    tls: str | None = None
    stages: tuple[StageSettings, ...] = ()
    spread: bool = False

    @property
    def bundles(self) -> list[dict[str, float]]:
        """What Ray reserves for one of them: the server, then each stage."""
        return [dict(self.resources), *(dict(stage.resources) for stage in self.stages)]

    @property
    def digest(self) -> str:
        """What changes when running servers must be replaced."""
        said = {**asdict(self), "scale": None, "version": __version__}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """A whole file. `ray`: HOST:PORT of a cluster, or "auto"; `servers_file`: where the router
    reads which servers there are.
    """

    name: str
    ray: str
    servers_file: str | None
    replicas: tuple[ReplicaSettings, ...]

    def of(self, name: str) -> ReplicaSettings | None:
        """The replicas of that name."""
        return next((each for each in self.replicas if each.name == name), None)


def read_cluster(path: Path) -> ClusterSettings:
    """The settings in a file. Raises ConfigError, which names the key, what it is, and what is
    allowed.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return cluster_of(found, path)


def cluster_of(found: Mapping[str, Any], path: Path) -> ClusterSettings:
    """The settings in a table of TOML, of the file `path`. Raises ConfigError."""
    table = _Table(found, f"{path}: ", ("name", "ray", "servers-file", "replicas"))
    replicas = table.take("replicas", _tables, "tables such as [replicas.chat]", {})
    if not replicas:
        raise ConfigError(f"{path}: no replicas; a table such as [replicas.chat] is expected")
    file = table.take("servers-file", parsers.path, "a path", None)
    return ClusterSettings(
        name=table.take("name", _matching(NAME), "letters, digits and hyphens", "luceasync"),
        ray=table.take("ray", _address, '"HOST:PORT" or "auto"', "auto"),
        servers_file=None if file is None else str(path.absolute().parent / file),
        replicas=tuple(_replica(name, each, path) for name, each in sorted(replicas.items())),
    )


REPLICA_KEYS = (
    *("count", "scale", "model", "devices", "resources", "flags", "port", "drain-s"),
    *("environment-file", "tls", "stages", "spread"),
)
_devices = "a list of devices such as cpu or cuda:0"
_resources = 'a table of positive numbers such as { CPU = 4, GPU = 1 }, without "memory"'


def _replica(name: str, found: Mapping[str, Any], path: Path) -> ReplicaSettings:
    where = f"{path}: replicas.{name}"
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: lower-case letters, digits and hyphens are expected")
    table = _Table(found, f"{where}.", REPLICA_KEYS)
    stages = tuple(
        _stage(each, f"{where}.stages[{i}].")
        for i, each in enumerate(table.take("stages", _list_of_tables, "tables", []))
    )
    replica = ReplicaSettings(
        name=name,
        scale=_scale(table, where),
        model=table.take("model", parsers.text, "a path or name", None),
        devices=table.take("devices", _list_of(_matching(DEVICE)), _devices, ()),
        resources=table.take("resources", _resource_table, _resources, {"CPU": 1.0}),
        flags=table.take("flags", _list_of(parsers.text), "a list of text", ()),
        port=table.take(
            "port", _not_text(parsers.integer(0, 65535)), "an integer from 0 to 65535", 0
        ),
        drain_s=table.take(
            "drain-s", _not_text(parsers.seconds(0)), "seconds from 0 to 86400", 60.0
        ),
        environment_file=table.take("environment-file", _absolute, "an absolute path", None),
        tls=table.take("tls", _absolute, "an absolute path", None),
        stages=stages,
        spread=table.take("spread", _not_text(parsers.boolean), "true or false", False),
    )
    _check(replica, where)
    return replica


def _scale(table: _Table, where: str) -> ScaleSettings:
    """Raises ConfigError."""
    count = table.take("count", _not_text(parsers.integer(0, MAX_COUNT)), f"0 to {MAX_COUNT}", None)
    found = table.take("scale", _one_table, "a table such as { min = 1, max = 4 }", None)
    if found is None:
        wanted = 1 if count is None else count
        return ScaleSettings(wanted, wanted)
    if count is not None:
        raise ConfigError(f"{where}: count and scale are both given; one is expected")
    keys = _Table(found, f"{where}.scale.", ("min", "max", "waiting", "busy-s", "idle-s"))
    least = keys.take("min", _not_text(parsers.integer(1, MAX_COUNT)), f"1 to {MAX_COUNT}", 1)
    numbers = f"{least} (min) to {MAX_COUNT}"
    some = _not_text(parsers.seconds(0.1))
    return ScaleSettings(
        least=least,
        most=keys.take("max", _not_text(parsers.integer(least, MAX_COUNT)), numbers, least),
        waiting=keys.take("waiting", some, "a number of requests above 0.1", 2.0),
        busy_s=keys.take("busy-s", some, "seconds from 0.1 to 86400", 10.0),
        idle_s=keys.take("idle-s", some, "seconds from 0.1 to 86400", 300.0),
    )


def _stage(found: Mapping[str, Any], where: str) -> StageSettings:
    table = _Table(found, where, ("devices", "resources"))
    devices = table.take("devices", _list_of(_matching(DEVICE)), _devices, ())
    if not devices:
        raise ConfigError(f"{where}devices: missing; {_devices} is expected")
    return StageSettings(devices, table.take("resources", _resource_table, _resources, {"CPU": 1}))


def _check(replica: ReplicaSettings, where: str) -> None:
    """What several keys say together. Raises ConfigError."""
    names = {flag.partition("=")[0] for flag in replica.flags}
    refused = {*OWN_FLAGS, *(STAGE_FLAGS if replica.stages or replica.devices else ())}
    if own := sorted(names & refused):
        raise ConfigError(f"{where}.flags: {own[0]} follows from this file; leave it out")
    if names & {*TLS_FLAGS}:
        raise ConfigError(f"{where}.flags: {TLS_FLAGS[0]}: routers ask these servers by HTTP")
    if secret := sorted(names & {*SECRET_FLAGS}):
        raise ConfigError(
            f"{where}.flags: {secret[0]} would be shown in lists of processes; use "
            f"environment-file{' or --api-key-file' if secret[0] == '--api-key' else ''}"
        )
    if replica.stages and (replica.tls is None or not replica.devices):
        lacks = "tls" if replica.tls is None else "devices"
        raise ConfigError(f"{where}.{lacks}: missing; replicas with stages need it")
    last = replica.port + replica.scale.most - 1
    if replica.port and last > 65535:
        raise ConfigError(f"{where}.port: {replica.port}; the last replica would get {last}")


# --- values ---------------------------------------------------------------------------------------


class _Table:
    """A table of the file. Raises ConfigError for keys that are not known."""

    def __init__(self, found: Mapping[str, Any], where: str, keys: Sequence[str]) -> None:
        self._found, self._where = found, where
        for key in found:
            if key not in keys:
                near = get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"{where}{key}: unknown key; {hint}allowed: {', '.join(sorted(keys))}"
                )

    def take(self, key: str, parse: Callable[[object], Any], expected: str, default: Any) -> Any:
        """The value, or the default. Raises ConfigError."""
        if key not in self._found:
            return default
        try:
            return parse(self._found[key])
        except ValueError:
            shown = json.dumps(self._found[key], default=str)
            raise ConfigError(f"{self._where}{key}: {shown}; {expected} is expected") from None


def _not_text(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    """`parse` without the text that it accepts from flags: TOML has numbers and booleans."""

    def parse_value(value: object) -> Any:
        if isinstance(value, str):
            raise ValueError
        return parse(value)

    return parse_value


def _matching(pattern: re.Pattern[str]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not pattern.fullmatch(parsers.text(value)):
            raise ValueError
        return parsers.text(value)

    return parse


def _list_of(parse: Callable[[object], str]) -> Callable[[object], tuple[str, ...]]:
    def parse_all(value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ValueError
        return tuple(parse(each) for each in value)

    return parse_all


def _one_table(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError
    return value


def _tables(value: object) -> Mapping[str, Mapping[str, Any]]:
    return {name: _one_table(each) for name, each in _one_table(value).items()}


def _list_of_tables(value: object) -> list[Mapping[str, Any]]:
    if not isinstance(value, list):
        raise ValueError
    return [_one_table(each) for each in value]


def _resource_table(value: object) -> Resources:
    """Amounts by the names that Ray has for them."""
    amount = _not_text(parsers.number)
    found = {name: amount(each) for name, each in _one_table(value).items()}
    if not found or not all(
        RESOURCE.fullmatch(name) and each > 0 and name.lower() != "memory"
        for name, each in found.items()
    ):
        raise ValueError
    return found


def _absolute(value: object) -> str:
    """A path that means the same on every machine."""
    if not parsers.text(value).startswith("/"):
        raise ValueError
    return parsers.text(value)


def _address(value: object) -> str | Literal["auto"]:
    text = parsers.text(value)
    host, _, port = text.rpartition(":")
    if text != "auto" and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError
    return text
