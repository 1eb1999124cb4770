"""What deploy/ has is read by its programs' parsers, and names flags, variables, routes and metrics
that exist.
"""

from __future__ import annotations

import json
import re
import shlex
from configparser import RawConfigParser
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from luceasync.backend.app import parse
from luceasync.options import OPTIONS
from luceasync.server.app import create_app
from luceasync.server.metrics import Metrics
from luceasync.server_config import ServerConfig
from luceasync.status import BackendProcesses, CacheStatus, ProcessStatus
from tests.server.scripted import ScriptedEngine

DEPLOY = Path(__file__).parents[1] / "deploy"
TEXTS = {path.name: path.read_text() for path in DEPLOY.iterdir()}
FLAGS = {f"--{option.name}" for option in OPTIONS}
VARIABLES = {f"LUCEASYNC_{option.name.replace('-', '_').upper()}" for option in OPTIONS}


class Unit(RawConfigParser):
    """A unit of systemd: keys may come again, and are told apart by case."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def exec_start(name: str) -> list[str]:
    unit = Unit(strict=False, delimiters=("=",), comment_prefixes=("#",))
    unit.read_string(TEXTS[name].replace("\\\n", " "))
    assert {"Unit", "Service", "Install"} == {*unit.sections()}
    return shlex.split(unit["Service"]["ExecStart"])


def test_the_server_s_unit_has_flags_of_the_server() -> None:
    program, serve, model, *rest = exec_start("luceasync.service")
    assert (Path(program).name, serve) == ("luceasync", "serve") and model.startswith("/")
    assert {word for word in rest if word.startswith("--")} <= FLAGS


def test_the_backend_s_unit_is_parsed_by_the_backend() -> None:
    program, *rest = exec_start("luceasync-backend.service")
    arguments = parse(rest)
    assert Path(program).name == "luceasync-backend"
    assert arguments.listen.port == 7000 and arguments.tls and arguments.model_dir


def documents(name: str) -> list[Any]:
    return [*yaml.safe_load_all(TEXTS[name])]


@pytest.mark.parametrize("name", sorted(name for name in TEXTS if name.endswith(".yaml")))
def test_every_manifest_is_yaml(name: str) -> None:
    assert all(isinstance(document, dict) for document in documents(name))


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_variables_and_paths_of_the_server_exist(name: str) -> None:
    assert {*re.findall(r"LUCEASYNC_[A-Z_]+", TEXTS[name])} <= VARIABLES
    app = create_app(ScriptedEngine(), ServerConfig())
    routes = {getattr(route, "path", "") for route in app.routes}
    assert {*re.findall(r"(?<=GET )/\w+|(?<=path: )/ready", TEXTS[name])} <= routes


def test_the_services_of_compose_name_each_other_and_files_that_exist() -> None:
    [compose] = documents("compose.cluster.yaml")
    services = compose["services"]
    for service in services.values():
        assert {*service.get("depends_on", ())} <= services.keys()
        for source, *_ in (volume.split(":") for volume in service.get("volumes", ())):
            is_file = source.startswith(".")
            assert (DEPLOY / source).is_file() if is_file else source in compose["volumes"], source
    workers = [word for word in services["router"]["command"] if word.startswith("http://")]
    assert {worker.split("/")[2].split(":")[0] for worker in workers} == {"replica1", "replica2"}


def test_what_kubernetes_selects_is_labelled_and_what_is_mounted_is_there() -> None:
    found = documents("kubernetes.yaml")
    templates = [item["spec"]["template"] for item in found if "template" in item.get("spec", {})]
    labels = [template["metadata"]["labels"] for template in templates]
    for item in found:
        assert item["apiVersion"] and item["kind"] and item["metadata"]["name"]
        selector = item.get("spec", {}).get("selector", {})
        wanted = selector.get("matchLabels", selector)
        assert not wanted or wanted in labels
        if (template := item.get("spec", {}).get("template")) is None:
            continue
        claims = item["spec"].get("volumeClaimTemplates", [])
        volumes = {each["metadata"]["name"] for each in claims}
        volumes |= {each["name"] for each in template["spec"].get("volumes", [])}
        for container in template["spec"]["containers"]:
            ports = {port["name"] for port in container["ports"]}
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes
            for probe in (container.get(f"{kind}Probe", {}) for kind in ("startup", "readiness")):
                assert probe.get("httpGet", {"port": "http"})["port"] in ports | {"http"}
    [replicas] = [o for o in found if o["metadata"]["name"] == "replica"]
    [server] = replicas["spec"]["template"]["spec"]["containers"]
    assert {word for word in server["args"] if word.startswith("--")} <= FLAGS


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads(TEXTS["grafana-dashboard.json"])
    targets = chain.from_iterable(panel.get("targets", ()) for panel in dashboard["panels"])
    shown = {name for t in targets for name in re.findall(r"luceasync_\w+", t["expr"])}
    assert len(shown) > 15
    assert shown <= exported()
    boxes = [panel["gridPos"] for panel in dashboard["panels"]]
    assert len({(box["x"], box["y"]) for box in boxes}) == len(boxes)


def exported() -> set[str]:
    """The names of a server's samples, with a store behind it and a process beside it."""
    engine = ScriptedEngine()
    counts = dict.fromkeys(("memory", "disk"), 1)
    asked = dict.fromkeys(("hits", "misses", "failures", "read_bytes", "written_bytes"), 1)
    engine.cache = CacheStatus(counts, counts, counts, counts, {"empty": 1}, store=asked)
    well = ProcessStatus("group 1", ("box2/cuda:0",), heartbeat_age_s=0.25)
    engine.processes = BackendProcesses((well,))
    metrics = Metrics(engine)
    metrics.count("/v1/chat/completions", 200)
    return {*re.findall(r"^(luceasync_\w+)", metrics.exposition().decode(), re.MULTILINE)}
