"""Servers and stages on a Ray cluster of two nodes: deaths, an update, a cut link, and Ray Serve.

    python -m tests.acceptance.check_ray [--parts errors,replicas,scale,stage,serve,cut]

Needs the extra `ray`, and for replicas and serve the router smg (`pip install smg`); what lacks
something is skipped. `cut` needs root: its two nodes are in network namespaces.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from luceasync.bench.report import Report, figure, median
from luceasync.ipc.certificates import make_pair
from tests.acceptance import command
from tests.acceptance.check_cluster import QUESTIONS
from tests.acceptance.check_routers import (
    FLAGS,
    SHARED,
    Conversation,
    Router,
    Talk,
    running,
    streamed,
)
from tests.acceptance.cluster.machine import until
from tests.acceptance.cluster.ray_nodes import (
    Managed,
    NamespaceNodes,
    RayNodes,
    ask,
    get,
    has_namespaces,
    ray_nodes,
    stream,
)
from tests.acceptance.hostile.server import ROOT, Server

MOST_AGAIN = 0.10
AWAY_S, BACK_S = 10.0, 20.0
UP_S, READY_S = 240.0, 180.0
TOKENS, STREAM_TOKENS, NUM_STREAMS = 8, 200, 3
ONE = ["--draft", "none", "--dtype", "fp32", "--parallel", "2", "--prefix-cache-memory", "128M"]


class Shared:
    """What several parts need: two nodes of Ray, and the answers of one process."""

    def __init__(self) -> None:
        self._closing = ExitStack()

    @cached_property
    def nodes(self) -> RayNodes:
        return self._closing.enter_context(ray_nodes(box1=2, box2=2))

    @cached_property
    def expected(self) -> list[str]:
        one = Server(ROOT, [*ONE, "--target-devices", "cpu:0"])
        try:
            return [ask(f"http://127.0.0.1:{one.port}", question) for question in QUESTIONS]
        finally:
            one.process.terminate()
            one.process.wait()

    def close(self) -> None:
        """End the nodes; they come again when they are asked for."""
        self.__dict__.pop("nodes", None)
        self._closing.close()


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        yield Path(folder)


# --- errors ---------------------------------------------------------------------------------------


def check_errors(report: Report, options: argparse.Namespace, shared: Shared) -> bool:
    """What is wrong is one line and status 2, before anything runs."""
    table = report.table(("what", "line"), "what is refused, with status 2")
    with _folder() as folder:
        nodes = shared.nodes
        managed = Managed(folder, nodes.address)
        cases: dict[str, tuple[dict[str, Any], str]] = {
            "an unknown key": ({"cuont": 1}, "did you mean count?"),
            "devices that are not there": ({"resources": {"GPU": 2}}, "GPU 2 on one machine"),
            "a model that is not there": ({"model": "/none"}, "/none"),
        }
        lines = {}
        for what, (table_of, words) in cases.items():
            managed.write(chat={"flags": FLAGS, **table_of})
            lines[what] = managed.run("up", expected=2), words
        lines["nothing runs"] = "", ""
        managed.run("down")
        lines["nothing runs"] = managed.run("status", expected=2), "no cluster luceasync runs"
        away = Managed(folder, "127.0.0.1:1")
        away.write(chat={})
        lines["no Ray there"] = away.run("up", expected=2), "no Ray cluster at 127.0.0.1:1"
    for what, (printed, _) in lines.items():
        table.add(what, printed.strip().splitlines()[-1])
    return all(words in printed.splitlines()[-1] for printed, words in lines.values())


# --- replicas -------------------------------------------------------------------------------------


def check_replicas(report: Report, options: argparse.Namespace, shared: Shared) -> bool:
    """Two servers behind smg: one's node dies, both are updated under load, all leave."""
    with _folder() as folder:
        nodes = shared.nodes
        managed = Managed(folder, nodes.address)
        flags = [*FLAGS, *SHARED, "--kv-cache-dir", str(folder / "prefixes")]
        chat = {"count": 2, "resources": {"CPU": 2}, "flags": flags, "drain-s": 30}
        managed.write(chat=chat)
        begun_s = time.monotonic()
        managed.up()
        up_s = time.monotonic() - begun_s
        with running(_smg(options.smg, managed.servers), [], folder) as (port, _):
            died = _death(report, managed, nodes, port, options)
            chat["flags"] = [*flags, "--prefill-chunk", "128"]
            managed.write(chat=chat)
            updated = _update(report, managed, port)
        last = managed.urls()
        managed.run("down")
        is_empty = managed.urls() == [] and all(get(url, "/health") is None for url in last)
        table = report.table(("both are ready after s", "all have left"), "begin and end")
        table.add(figure(up_s, digits=1), "yes" if is_empty else "NO")
    return died and updated and is_empty


def _smg(program: str, servers: Path) -> Router:
    def words(port: int, _: Sequence[object], __: Path) -> list[str]:
        found = ["--discovery-provider", "file", "--discovery-file", str(servers)]
        found += ["--health-check-endpoint", "/ready", "--health-check-interval-secs", "2"]
        found += ["--prometheus-port", str(port + 1 if port < 65535 else port - 1)]
        base = [program, "launch", "--policy", "cache_aware", "--host", "127.0.0.1"]
        return [*base, "--port", str(port), *found]

    return Router("smg", words)


def _death(
    report: Report, managed: Managed, nodes: Any, port: int, options: argparse.Namespace
) -> bool:
    """A node is killed between turns; another one comes, as with an autoscaler."""
    before = {each["name"]: each["url"] for each in managed.replicas()}
    talk = Talk([Conversation.of("before", n) for n in range(options.conversations)])
    talk.turns(port, range(3), TOKENS)
    first = talk.seen.ends.copy()
    talk.seen.prompt_tokens = talk.seen.cached_tokens = talk.seen.again_tokens = 0
    nodes.kill("box2")
    begun_s = time.monotonic()
    talk.turns(port, range(3, 5), TOKENS)
    nodes.add("box2", 2)
    until(lambda: _is_back(managed, before), "the servers are not back", READY_S)
    back_s = time.monotonic() - begun_s
    talk.turns(port, range(5, 7), TOKENS)
    after = talk.seen.ends - first
    again = talk.seen.again_tokens / max(1, talk.seen.prompt_tokens)
    dead = [url for url in before.values() if url not in managed.urls()]
    is_dead = len(dead) == 1 and get(dead[0], "/health") is None
    columns = ("answers before", "after the death", "back after s", "prefilled again")
    table = report.table((*columns, "the server died with it"), "a node is killed")
    table.add(_words(first), _words(after), figure(back_s, digits=1), f"{again:.1%}", str(is_dead))
    return is_dead and {*first, *after} == {"right"} and again <= MOST_AGAIN


def _is_back(managed: Managed, before: dict[str, str]) -> bool:
    """Both serve, one of them elsewhere."""
    urls = managed.urls()
    return len(urls) == 2 and {*urls} != {*before.values()}


def _update(report: Report, managed: Managed, port: int) -> bool:
    """Servers are replaced, one at a time, while clients ask on, and long answers stream."""
    before = {each["digest"] for each in managed.replicas()}
    is_over, ends, streams = threading.Event(), Counter[str](), Counter[str]()

    def ask_on() -> None:
        while not is_over.is_set():
            talk = Talk([Conversation.of(f"update {time.monotonic()}", n) for n in range(4)])
            talk.turns(port, range(4), TOKENS)
            ends.update(talk.seen.ends)

    def stream_on() -> None:
        while not is_over.is_set():
            streams[stream(port, QUESTIONS[0], STREAM_TOKENS)] += 1

    clients = [threading.Thread(target=run) for run in (ask_on, *[stream_on] * NUM_STREAMS)]
    for client in clients:
        client.start()
    begun_s = time.monotonic()
    managed.up()
    seconds = time.monotonic() - begun_s
    is_over.set()
    for client in clients:
        client.join()
    is_new = not before & {each["digest"] for each in managed.replicas()}
    columns = ("answers", "streams", "both are new", "after s")
    table = report.table(columns, "an update under load")
    table.add(_words(ends), _words(streams), str(is_new), figure(seconds, digits=1))
    return is_new and {*ends} == {"right"} and {*streams} == {"whole"}


def _words(ends: Counter[str]) -> str:
    return ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))


# --- scaling --------------------------------------------------------------------------------------


def check_scale(report: Report, options: argparse.Namespace, shared: Shared) -> bool:
    """A second server comes while requests wait, and leaves when none do."""
    with _folder() as folder:
        nodes = shared.nodes
        managed = Managed(folder, nodes.address)
        scale = {"min": 1, "max": 2, "waiting": 1, "busy-s": 2, "idle-s": 3}
        flags = [*FLAGS, "--parallel", "1"]
        managed.write(chat={"scale": scale, "resources": {"CPU": 2}, "flags": flags, "drain-s": 5})
        managed.up()
        is_over = threading.Event()

        def ask_on(number: int) -> None:
            while not is_over.is_set():
                ask(managed.urls()[0], f"{QUESTIONS[0]} {number}")

        clients = [threading.Thread(target=ask_on, args=(n,)) for n in range(4)]
        for client in clients:
            client.start()
        more_s = until(lambda: len(managed.urls()) == 2, "no second server", READY_S)
        is_over.set()
        for client in clients:
            client.join()
        less_s = until(lambda: len(managed.urls()) == 1, "the second one stays", READY_S)
        managed.run("down")
    table = report.table(("two after s", "one after s"), "waiting requests, and none")
    table.add(figure(more_s, digits=1), figure(less_s, digits=1))
    return True


# --- stages ---------------------------------------------------------------------------------------


def _deep(folder: Path) -> dict[str, Any]:
    """One model over two nodes: its first layers on box1, the others on box2."""
    [*_, file] = make_pair(folder, ["box1", "box2"])
    stage = {"devices": ["cpu:0"], "resources": {"CPU": 1, "box2": 1}}
    return {
        "devices": ["cpu:0"],
        "resources": {"CPU": 1, "box1": 1},
        "tls": str(file),
        "flags": ONE,
        "stages": [stage],
        "drain-s": 5,
    }


def check_stage(report: Report, options: argparse.Namespace, shared: Shared) -> bool:
    """The answers are those of one process, also when the stage's node was killed meanwhile."""
    expected = shared.expected
    with _folder() as folder:
        nodes = shared.nodes
        managed = Managed(folder, nodes.address)
        managed.write(deep=_deep(folder))
        managed.up()
        [url] = managed.urls()
        found = [ask(url, question) for question in QUESTIONS]
        nodes.kill("box2")
        away_s = until(lambda: get(url, "/ready") is None, "the stage is not away", 30.0)
        nodes.add("box2", 2)
        back_s = until(lambda: get(url, "/ready") is not None, "not back", READY_S)
        again = [ask(url, question) for question in QUESTIONS]
        starts = managed.replicas()[0]["starts"]
        managed.run("down")
    columns = ("equal", "away after s", "back after s", "equal then", "starts of the server")
    table = report.table(columns, "a stage on a second node, which is killed; another one comes")
    same, same_again = (
        sum(a == b for a, b in zip(expected, f, strict=True)) for f in (found, again)
    )
    table.add(same, figure(away_s, digits=1), figure(back_s, digits=1), same_again, starts)
    return same == same_again == len(QUESTIONS) and starts == 1


def check_cut(report: Report, options: argparse.Namespace, shared: Shared) -> bool:
    """The link between two machines is cut: the stage is away, whatever Ray believes."""
    if not has_namespaces():
        print("cut: skipped: it needs root and network namespaces")
        return True
    expected = shared.expected
    shared.close()  # a machine has the ports of one cluster
    with _folder() as folder:
        nodes = NamespaceNodes(folder)
        try:
            managed = Managed(folder, nodes.address)
            managed.write(deep=_deep(folder))
            _wait_for_nodes(nodes.address, 2)
            managed.up()
            [url] = managed.urls()
            found = [ask(url, question) for question in QUESTIONS]
            nodes.cut()
            away_s = until(lambda: get(url, "/ready") is None, "the stage is not away", 30.0)
            believed = _num_alive(nodes.address)
            time.sleep(max(0.0, 12.0 - away_s))
            nodes.mend()
            back_s = until(lambda: get(url, "/ready") is not None, "not back", READY_S)
            again = [ask(url, question) for question in QUESTIONS]
            managed.run("down")
        finally:
            nodes.close()
    columns = ("equal", "away after s", "nodes alive for Ray then", "back after s", "equal then")
    table = report.table(columns, "the link between two namespaces is cut for 12 s")
    same, same_again = (
        sum(a == b for a, b in zip(expected, f, strict=True)) for f in (found, again)
    )
    table.add(same, figure(away_s, digits=1), believed, figure(back_s, digits=1), same_again)
    return same == same_again == len(QUESTIONS) and away_s <= AWAY_S and back_s <= BACK_S


def _num_alive(address: str) -> int:
    """Nodes that Ray holds for alive."""
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        return sum(bool(node["Alive"]) for node in ray.nodes())
    finally:
        ray.shutdown()


def _wait_for_nodes(address: str, count: int) -> None:
    def are_there() -> bool:
        with suppress(ConnectionError):
            return _num_alive(address) == count
        return False

    until(are_there, "the nodes of Ray do not come", READY_S)


# --- Ray Serve ------------------------------------------------------------------------------------


def check_serve(report: Report, options: argparse.Namespace, shared: Shared) -> bool:
    """Processor time of a streamed token, behind smg and in Ray Serve; models run in one thread."""
    rows: dict[str, list[list[float]]] = {}
    with _folder() as folder:
        nodes = shared.nodes
        config = folder / "luceasync.toml"
        config.write_text(
            '[draft]\ndraft = "none"\n[placement]\ntarget_devices = ["cpu:0"]\n'
            '[engine]\nparallel = 4\n[cache]\nprefix_cache_memory = "512M"\n'
        )
        managed = Managed(folder, nodes.address)
        managed.write(chat={"resources": {"CPU": 1}, "flags": FLAGS, "drain-s": 5})
        managed.up()
        with (
            running(_smg(options.smg, managed.servers), [], folder) as (smg_port, smg_pid),
            _serving(nodes.address, config) as port,
        ):
            smg = [psutil.Process(smg_pid), *psutil.Process(smg_pid).children(recursive=True)]
            ways = {
                "smg": (smg_port, smg, _processes("luceasync serve")),
                "Ray Serve": (port, _processes("ray::Proxy"), _processes("ray::ServeReplica")),
            }
            for name, (at, *processes) in list(ways.items()) * (options.rounds + 1):
                rows.setdefault(name, []).append(_us_a_token(at, processes))
        managed.run("down")
    table = report.table(("way", "us a token between", "of the server"), "8 streams of 96 tokens")
    for name, [_, *measured] in rows.items():  # the first one warms up
        table.add(name, *(figure(median(each), digits=0) for each in zip(*measured, strict=True)))
    return all(us > 0 for measured in rows.values() for each in measured for us in each)


@contextmanager
def _serving(address: str, config: Path) -> Iterator[int]:
    """The port of Ray Serve, with an application that has one replica."""
    import ray
    from ray import serve

    from luceasync.cluster.ray_serve import build

    with socket.create_server(("127.0.0.1", 0)) as found:
        port = int(found.getsockname()[1])
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build({"config": str(config), "num_cpus": 1}), name="luceasync")
        yield port
        serve.shutdown()
    finally:
        ray.shutdown()


def _processes(words: str) -> list[psutil.Process]:
    """Those whose commands have these words."""
    found = psutil.process_iter(["cmdline"])
    return [each for each in found if words in " ".join(each.info["cmdline"] or ())]


def _us_a_token(port: int, processes: Sequence[Sequence[psutil.Process]]) -> list[float]:
    """Processor time of each group of processes for a token of streams at that port."""
    before_s = [_busy_s(each) for each in processes]
    num_events, _ = streamed(port)
    after_s = [_busy_s(each) for each in processes]
    return [(b - a) / num_events * 1e6 for a, b in zip(before_s, after_s, strict=True)]


def _busy_s(processes: Sequence[psutil.Process]) -> float:
    times = [each.cpu_times() for each in processes]
    return sum(each.user + each.system for each in times)


# --- the check ------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Report, argparse.Namespace, Shared], bool]] = {
    "errors": check_errors,
    "replicas": check_replicas,
    "scale": check_scale,
    "stage": check_stage,
    "serve": check_serve,
    "cut": check_cut,
}
NEEDS_SMG = ("replicas", "serve")


def main() -> None:
    """Run the parts and print what was seen."""
    parser = command.parser(__doc__, rounds=1)
    parser.add_argument("--parts", type=command.names, default=[*PARTS])
    parser.add_argument("--conversations", type=int, default=10)
    beside = Path(sys.executable).with_name("smg")
    found = str(beside) if beside.exists() else shutil.which("smg")
    parser.add_argument("--smg", metavar="PROGRAM", default=found)
    options = parser.parse_args()
    if importlib.util.find_spec("ray") is None:
        print("skipped: ray is not installed: pip install 'luceasync[ray]'")
        return
    os.environ["PYTHONPATH"] = str(ROOT)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    report, shared, is_right = command.open_report(options), Shared(), True
    try:
        for name in options.parts:
            if name in NEEDS_SMG and options.smg is None:
                print(f"{name}: skipped: there is no smg: pip install smg")
                continue
            begun_s = time.monotonic()
            was_right = PARTS[name](report, options, shared)
            words = "right" if was_right else "WRONG"
            print(f"{name}: {words}, {time.monotonic() - begun_s:.0f} s", flush=True)
            is_right &= was_right
    finally:
        shared.close()
    sys.exit(0 if is_right else 1)


if __name__ == "__main__":
    main()
