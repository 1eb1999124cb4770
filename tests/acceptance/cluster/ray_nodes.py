"""Ray clusters of two nodes, whose link can be cut in network namespaces, and what runs on them."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from luceasync.ipc.tcp import Address, is_reachable
from tests.acceptance.cluster.machine import until

HERE, THERE, PORT = "10.213.58.1", "10.213.58.2", 6399
HEAD_S = 180.0
UP_S, DONE_S = 240.0, 300.0
MODEL = "stdlib-15m"


class RayNodes:
    """Nodes of one machine, each with a number of CPUs and a resource of its own name."""

    def __init__(self, cpus: Mapping[str, int]) -> None:
        """The first one is the head."""
        from ray.cluster_utils import Cluster

        self._nodes: dict[str, Any] = {}
        self._cluster = Cluster()
        for name, num_cpus in cpus.items():
            self.add(name, num_cpus)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, name: str, num_cpus: int) -> None:
        self._nodes[name] = self._cluster.add_node(
            num_cpus=num_cpus, resources={name: 1}, include_dashboard=False
        )

    def kill(self, name: str) -> None:
        """As if its machine had gone."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes(**cpus: int) -> Iterator[RayNodes]:
    nodes = RayNodes(cpus)
    try:
        yield nodes
    finally:
        nodes.close()


def has_namespaces() -> bool:
    """Whether this user may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"luceasync-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], stderr=subprocess.DEVNULL, check=False)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made.returncode == 0


class NamespaceNodes:
    """A head here, with the resource "box1", and a node in a namespace, with "box2"."""

    def __init__(self, folder: Path) -> None:
        self._closing = ExitStack()
        self.namespace = f"luceasync-ray-{os.getpid()}"
        try:
            self._link()
            self._node(folder, "box1", [], ["--head", f"--port={PORT}"], HERE)
            until(lambda: is_reachable(Address(HERE, PORT), 1.0), "no head of Ray", HEAD_S)
            inside = ["ip", "netns", "exec", self.namespace]
            self._node(folder, "box2", inside, [f"--address={self.address}"], THERE)
        except BaseException:
            self._closing.close()
            raise

    @property
    def address(self) -> str:
        return f"{HERE}:{PORT}"

    def cut(self) -> None:
        """Let nothing pass, and tell no end."""
        _ip("-n", self.namespace, "link", "set", "box2", "down")

    def mend(self) -> None:
        _ip("-n", self.namespace, "link", "set", "box2", "up")

    def close(self) -> None:
        self.mend()
        self._closing.close()

    def _link(self) -> None:
        _ip("netns", "add", self.namespace)
        self._closing.callback(_ip, "netns", "del", self.namespace)
        here = f"ray1-{os.getpid()}"
        peer = ("peer", "name", "box2", "netns", self.namespace)
        _ip("link", "add", here, "type", "veth", *peer)
        _ip("addr", "add", f"{HERE}/24", "dev", here)
        _ip("link", "set", here, "up")
        _ip("-n", self.namespace, "addr", "add", f"{THERE}/24", "dev", "box2")
        for name in ("lo", "box2"):
            _ip("-n", self.namespace, "link", "set", name, "up")

    def _node(
        self, folder: Path, name: str, inside: Sequence[str], role: Sequence[str], host: str
    ) -> None:
        words = [str(Path(sys.executable).with_name("ray")), "start", "--block", *role]
        words += [f"--node-ip-address={host}", "--num-cpus=2", "--disable-usage-stats"]
        words += [f"--resources={json.dumps({name: 1})}"]
        words += ["--include-dashboard=false"] if "--head" in role else []
        log = self._closing.enter_context((folder / f"{name}.log").open("ab"))
        started = subprocess.Popen(
            [*inside, *words], stdout=log, stderr=log, start_new_session=True
        )
        self._closing.callback(_end, started)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a node with all its processes; they are in its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Managed:
    """A cluster.toml, and the commands that read it."""

    def __init__(self, folder: Path, ray: str) -> None:
        self.folder, self._ray = folder, ray
        self.file, self.servers = folder / "cluster.toml", folder / "servers.json"

    def write(self, **replicas: dict[str, Any]) -> None:
        lines = [f"ray = {json.dumps(self._ray)}", 'servers-file = "servers.json"']
        for name, table in replicas.items():
            lines.append(f"[replicas.{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in table.items()]
        self.file.write_text("\n".join(lines) + "\n")

    def run(self, *words: str, expected: int = 0) -> str:
        """What the command prints, both streams together."""
        done = self.start(*words)
        printed, _ = done.communicate(timeout=DONE_S)
        if done.returncode != expected:
            raise SystemExit(f"cluster {' '.join(words)}: status {done.returncode}: {printed}")
        return printed

    def start(self, *words: str) -> subprocess.Popen[str]:
        command_line = [sys.executable, "-m", "luceasync", "cluster", *words]
        command_line.insert(5, str(self.file))
        return subprocess.Popen(
            command_line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def up(self) -> None:
        self.run("up", "--timeout", f"{UP_S:g}")

    def replicas(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("status", "--json"))["replicas"]
        return found

    def urls(self) -> list[str]:
        """Those in the router's list."""
        return [worker["url"] for worker in json.loads(self.servers.read_text())["workers"]]


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(each) for each in value) + "]"
    return json.dumps(value)


def get(url: str, path: str) -> dict[str, Any] | None:
    """What it answers; None: it does not, or not with 200."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=5)
    with suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        response = connection.getresponse()
        content = response.read()
        found: dict[str, Any] | None = json.loads(content) if response.status == 200 else None
        return found
    return None


def ask(url: str, question: str) -> str:
    """A greedy answer, or what came instead."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    body |= {"max_tokens": 40, "model": MODEL}
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"!{type(error).__name__}"
    if response.status != 200:
        return f"!{response.status}"
    return str(json.loads(content)["choices"][0]["message"]["content"])


def stream(port: int, question: str, num_tokens: int) -> str:
    """How a stream of so many tokens ends: "whole", or otherwise."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": question}], "model": MODEL}
    body |= {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        words = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), words)
        response = connection.getresponse()
        content = response.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()
    is_whole = content.rstrip().endswith(b"data: [DONE]") and b'"finish_reason":"length"' in content
    return "whole" if is_whole else f"{response.status}, cut after {len(content)} bytes"
