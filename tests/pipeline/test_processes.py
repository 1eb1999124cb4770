"""Which process runs which device: the rules, and the errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from luceasync.config import PlacementConfig
from luceasync.errors import PlacementError
from luceasync.ipc.certificates import make_pair
from luceasync.ipc.tcp import Address
from luceasync.pipeline.devices import share_host_memory
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.remote.discovery import BackendProgram, choose_processes, describe_devices
from tests.processes import backend_program


def is_here(name: str) -> bool:
    return name.partition(":")[0] in ("cpu", "cuda")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return backend_program(tmp_path)


def chosen(names: str, *bins: str, ipc: str = "auto", own: Path | None = None):
    devices = tuple(names.split(","))
    found = choose_processes(
        devices, PlacementConfig(devices, ipc_bins=bins, ipc=ipc), is_here, own
    )
    return found.of_devices


@pytest.mark.parametrize(
    ("names", "processes"),
    [
        ("cuda:0,hip:0,hip:1", (0, 1, 1)),
        ("cuda:0,hip:0", (0, 1)),
        ("hip:0,cuda:0,cpu", (1, 0, 0)),
        ("hip:0,cuda:0,hip:1", (1, 0, 2)),
    ],
)
def test_what_this_process_lacks_gets_one_of_its_own(program, names, processes):
    assert chosen(names, f"hip={program}") == processes


@pytest.mark.parametrize(
    ("names", "processes"),
    [
        ("cpu:0,cpu:1,cpu:2", (0, 1, 1)),
        ("cpu:0,cuda:0,cpu:1", (0, 1, 2)),
        ("cuda:0,hip:0,hip:1", (0, 1, 1)),
        ("cuda:0", (0,)),
    ],
)
def test_always_is_all_but_the_first(program, names, processes):
    bins = [str(program)] if len(processes) > 1 else []
    assert chosen(names, *bins, ipc="always") == processes


def test_without_a_program_this_environment_s_own_runs_its_devices(program):
    assert chosen("cuda:0,cpu:0", ipc="always", own=program) == (0, 1)
    with pytest.raises(PlacementError, match="nothing runs hip devices in another process"):
        chosen("cuda:0,hip:0", ipc="always", own=program)


def test_without_a_program_nothing_changes():
    assert chosen("cuda:0,hip:0") == (0, 0)  # find_devices refuses it, in its own words


@pytest.mark.parametrize(
    ("bins", "words"),
    [
        (["tpu=/bin/sh"], "'tpu' is not a backend; expected one of cpu, cuda, hip"),
        (["hip="], "no path"),
        (["hip=/bin/sh", "hip=/bin/true"], "a second program for hip"),
        (["/bin/sh", "/bin/true"], "a second program for all other backends"),
        (["hip=/nowhere/backend"], "/nowhere/backend: not an executable file"),
        (["hip=/etc/passwd"], "/etc/passwd: not an executable file"),
        (["hip=/bin/sh", "cpu=/bin/sh"], "cpu=/bin/sh: it would run no device"),
        (
            ["hip=/bin/sh", "cpu=/bin/true"],
            "cpu=/bin/true: it would run no device",
        ),
    ],
)
def test_a_program_that_cannot_be_is_one_line(bins, words):
    with pytest.raises(PlacementError) as caught:
        chosen("cuda:0,hip:0", *bins)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_devices_that_ray_places_are_reached_through_the_program_here(program, tmp_path: Path):
    def is_on_cpu(name: str) -> bool:
        return name == "cpu:0"

    [file] = make_pair(tmp_path, ["box1"])
    url = "ray://10.0.0.1:6379/home.chat.0.abc/1"
    placement = PlacementConfig(ipc_bins=(f"cuda@stage1={url}",), ipc_tls=file)
    chosen = choose_processes(["cpu:0", "stage1/cuda:0"], placement, is_on_cpu, program)
    assert chosen.of_devices == (0, 1)
    arguments = ("--connect-ray", url, "--name", "stage1", "--tls", str(file))
    said = f"cuda@stage1={url}"
    head = Address("10.0.0.1", 6379)
    assert chosen.programs == {1: BackendProgram(program, arguments, head, said)}
    junk = PlacementConfig(ipc_bins=("cuda@stage1=ray://10.0.0.1:6379",), ipc_tls=file)
    with pytest.raises(PlacementError, match=r"^--target-shard-ipc-bin ray://10.*is expected$"):
        choose_processes(["cpu:0", "stage1/cuda:0"], junk, is_on_cpu, program)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path):
    folder = tmp_path / "a=b"
    folder.mkdir()
    assert chosen("cuda:0,hip:0", str(backend_program(folder))) == (0, 1)


def test_devices_on_the_host_share_its_memory_in_whatever_process():
    offers = share_host_memory(
        [offer_of("cpu:0", 90), offer_of("cuda:0", 50), offer_of("cpu:1", 80)]
    )
    assert [offer.free_bytes for offer in offers] == [45, 50, 40]


@pytest.mark.slow
def test_a_backend_says_what_its_devices_offer(tmp_path: Path):
    program = backend_program(tmp_path, ["hip:0=cpu:0"])
    [offer] = describe_devices(BackendProgram(program), ["hip:0"])
    assert (offer.name, offer.runs_async) == ("hip:0", False)
    assert offer.free_bytes > 0
    with pytest.raises(PlacementError, match=r"hip:1: this torch build .* not hip \(") as caught:
        describe_devices(BackendProgram(program), ["hip:0", "hip:1"])
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["exit 3", "echo gone >&2; kill -9 $$", "exec sleep 0"])
def test_a_program_that_is_no_backend_is_one_line(tmp_path: Path, script: str):
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    with pytest.raises(PlacementError, match="no answer: ") as caught:
        describe_devices(BackendProgram(path), ["cpu:0"])
    assert "\n" not in str(caught.value)
