"""cluster.toml: what it may say, and the one line about what it may not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from luceasync.cluster.settings import (
    REPLICA_KEYS,
    ScaleSettings,
    StageSettings,
    cluster_of,
    read_cluster,
)
from luceasync.errors import ConfigError

WHOLE = """
name = "home"
ray = "10.0.0.1:6379"
servers-file = "servers.json"

[replicas.chat]
count = 3
model = "/srv/models/Qwen3-27B"
devices = ["cuda:0"]
resources = { CPU = 4, GPU = 1 }
flags = ["--kv-store", "s3://nodes/qwen"]
port = 8000
drain-s = 120
environment-file = "/etc/luceasync/replica.env"
tls = "/etc/luceasync/machine.pem"
spread = true
stages = [{ devices = ["cuda:0"], resources = { GPU = 1 } }]

[replicas.small]
scale = { min = 1, max = 4, waiting = 3, busy-s = 5, idle-s = 60 }
"""


def read(tmp_path: Path, text: str) -> str:
    """The error that a file with this text is."""
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_cluster(file)
    [line] = str(refused.value).splitlines()
    return line


def test_a_whole_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(WHOLE)
    settings = read_cluster(file)
    assert (settings.name, settings.ray) == ("home", "10.0.0.1:6379")
    assert settings.servers_file == str(tmp_path / "servers.json"), "beside the file"
    chat, small = settings.replicas
    assert chat.scale == ScaleSettings(3, 3) and chat.scale.is_fixed
    assert chat.stages == (StageSettings(("cuda:0",), {"GPU": 1.0}),)
    assert chat.bundles == [{"CPU": 4.0, "GPU": 1.0}, {"GPU": 1.0}]
    assert small.scale == ScaleSettings(1, 4, 3.0, 5.0, 60.0) and not small.scale.is_fixed
    assert small.model is None, "the bundled one"


def test_the_example_of_the_docs_is_read_and_has_every_key() -> None:
    file = Path(__file__).parents[2] / "docs/cluster.toml"
    settings = read_cluster(file)
    found = {each.name: len(each.stages) for each in settings.replicas}
    assert found == {"chat": 0, "deep": 1}
    assert settings.replicas[1].scale == ScaleSettings(1, 4), "defaults"
    assert all(re.search(rf"\b{key}\b", file.read_text()) for key in REPLICA_KEYS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("junk = 1", "junk: unknown key; allowed: name, ray"),
        ("[replicas.a]\ncuont = 1", "replicas.a.cuont: unknown key; did you mean count?"),
        ("[replicas.a]\nstages = [{ gpu = 1 }]", "replicas.a.stages[0].gpu: unknown key"),
        ("ray = 'junk'\n[replicas.a]", 'ray: "junk"; "HOST:PORT" or "auto" is expected'),
        ("name = 'x'", "no replicas; a table such as [replicas.chat] is expected"),
        ("[replicas.A]", "replicas.A: lower-case letters"),
        ("[replicas.a]\ncount = -1", "replicas.a.count: -1; 0 to 1000 is expected"),
        ("[replicas.a]\ncount = '2'", 'replicas.a.count: "2"; 0 to 1000 is expected'),
        ("[replicas.a]\nport = '8K'", 'replicas.a.port: "8K"; an integer from 0'),
        ("[replicas.a]\ndrain-s = '60'", 'drain-s: "60"; seconds from 0'),
        ("[replicas.a]\nspread = 'yes'", 'spread: "yes"; true or false is expected'),
        ("[replicas.a]\nresources = { GPU = '1' }", 'resources: {"GPU": "1"}; a table'),
        ("[replicas.a]\ncount = 1\nscale = {}", "count and scale are both given"),
        ("[replicas.a]\nscale = { min = 3, max = 2 }", "scale.max: 2; 3 (min) to 1000"),
        ("[replicas.a]\nresources = { GPU = 0 }", 'replicas.a.resources: {"GPU": 0}; a table'),
        ("[replicas.a]\ndevices = ['gpu']", 'devices: ["gpu"]; a list of devices'),
        ("[replicas.a]\nflags = ['--port', '1']", "--port follows from this file"),
        ("[replicas.a]\nflags = ['--tls-cert=a']", "routers ask these servers by HTTP"),
        ("[replicas.a]\nport = 65535\ncount = 2", "the last replica would get 65536"),
        ("[replicas.a]\ntls = 'b.pem'", 'tls: "b.pem"; an absolute path is expected'),
        (
            "[replicas.a]\ndevices = ['cpu']\nstages = [{ devices = ['cpu'] }]",
            "replicas.a.tls: missing",
        ),
        ("[replicas.a]\nstages = [{}]", "replicas.a.stages[0].devices: missing"),
        ("[", "is not TOML"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_it(tmp_path: Path, text: str, words: str) -> None:
    assert words in read(tmp_path, text)


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file or directory"):
        read_cluster(tmp_path / "none.toml")


def test_a_secret_in_the_flags_is_refused_without_being_told(tmp_path: Path) -> None:
    line = read(tmp_path, "[replicas.a]\nflags = ['--api-key', 'hush']")
    assert "--api-key would be shown" in line and "hush" not in line


def test_servers_are_replaced_for_what_they_are_started_with_and_not_for_their_number() -> None:
    def digest(**changed: object) -> str:
        found = {"replicas": {"a": {"count": 1, **changed}}}
        return cluster_of(found, Path("cluster.toml")).replicas[0].digest

    assert digest() == digest(count=2)
    assert digest() != digest(flags=["--parallel", "2"])
    assert digest() != digest(model="/srv/other")
