"""Places in a Ray cluster, and the listener that an actor runs there; without Ray."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from luceasync.errors import ConfigError
from luceasync.ipc.certificates import make_pair, name_of_peer, tls_context
from luceasync.ipc.ray_launcher import (
    LeashedProgram,
    ListenerActor,
    RayPlace,
    connect_ray,
    import_ray,
    parse_ray_url,
    resource_options,
)
from luceasync.ipc.tcp import Address, dial

HEAD = Address("10.0.0.1", 6379)


def test_a_place_is_a_bundle_or_wherever_resources_are() -> None:
    bundle = parse_ray_url("ray://10.0.0.1:6379/home.chat.0.abc/2")
    assert bundle == RayPlace(HEAD, "home.chat.0.abc", 2)
    anywhere = parse_ray_url("ray://10.0.0.1:6379?GPU=1&box2=0.5")
    assert anywhere == RayPlace(HEAD, resources={"GPU": 1.0, "box2": 0.5})


@pytest.mark.parametrize(
    "url",
    [
        *("ray://a", "ray://a:1", "tls://a:1?GPU=1", "ray://a:1?GPU", "ray://a:1?GPU=x"),
        *("ray://a:1/group/x", "ray://a:1/group/0?GPU=1", "ray://a:99999?GPU=1"),
    ],
)
def test_what_is_no_place_is_refused_with_what_is_expected(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_ray_url(url)
    assert str(refused.value).startswith(f"{url}: ")
    assert "ray://HOST:PORT?GPU=1, or HOST:PORT/GROUP/BUNDLE, is expected" in str(refused.value)


def test_resources_are_told_to_ray_as_it_names_them() -> None:
    found = resource_options({"CPU": 2.0, "GPU": 1.0, "box2": 0.5})
    assert found == {"num_cpus": 2.0, "num_gpus": 1.0, "resources": {"box2": 0.5}}
    assert resource_options({"GPU": 1.0})["num_cpus"] == 0


def test_without_ray_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"x needs the package ray: pip install 'luceasync\[ray"):
        import_ray("x")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_no_cluster_at_the_address_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"x: no Ray cluster at 127\.0\.0\.1:1;"):
        connect_ray("127.0.0.1:1", "x")


def test_variables_of_ray_s_workers_are_not_those_of_programs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("RAY_JOB_ID", "RAY_AUTH_TOKEN", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    code = "import os, sys; print(dict(os.environ), file=sys.stderr)"
    program = LeashedProgram(["timeit", "-n1", "-r1", code], {"A": "1"})
    assert program.wait() == 0
    program.end(0.0)
    environment = ast.literal_eval(program.lines[0])
    assert environment["A"] == "1" and "RAY_JOB_ID" not in environment
    assert environment["RAY_AUTH_TOKEN"] == environment["OMP_NUM_THREADS"] == "7"
    capfd.readouterr()


@pytest.mark.slow  # starts a listener
def test_an_actor_runs_a_listener_with_the_name_of_its_machine_until_it_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    box1, box2 = make_pair(tmp_path, ["box1", "box2"])
    actor = ListenerActor(str(box2), "127.0.0.1", ["--offer", "hip:0=cpu:0"])
    found = actor.where()
    assert (found.host, found.machine) == ("127.0.0.1", "box2")
    context = tls_context(box1, "tls", is_server=False)
    address = Address(found.host, found.port)
    with dial(address, context, found.machine, 10.0) as link:
        assert name_of_peer(link) == "box2"
    actor.end()
    with pytest.raises(OSError), dial(address, context, found.machine, 1.0):
        pass
    capfd.readouterr()


@pytest.mark.slow  # starts a listener
def test_a_listener_that_does_not_begin_is_told_by_its_last_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    [box1] = make_pair(tmp_path, ["box1"])
    actor = ListenerActor(str(box1), "127.0.0.1", ["--offer", "junk"])
    with pytest.raises(RuntimeError, match=r"does not listen: .*junk"):
        actor.where()
    capfd.readouterr()


def test_a_node_without_its_machine_s_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file of `luceasync pair` is expected"):
        ListenerActor(str(tmp_path / "none.pem"), "127.0.0.1", [])
