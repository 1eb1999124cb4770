"""What a checkout and its installation must keep: names, sizes, versions, docstrings.

Subprocesses run at the repository's root, where the folder cuda/ is on sys.path.
"""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import luceasync

ROOT = Path(__file__).parents[1]
FOLDERS = ("luceasync", "cuda", "cyext", "scripts", "training", "tests")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MAX_LINES = 500
# A tree, and maps.
DRAWN = {ROOT / "luceasync" / name for name in ("errors.py", "__init__.py")}
DRAWN |= {ROOT / "luceasync" / "engine" / "sampling" / "__init__.py"}

# What a module begins with, but for comments.
DOCSTRING = re.compile(r'(?:#.*\n|\n)*r?"""(.*?)"""', re.DOTALL)

# Hosts of package registries: a checkout must install from whichever index pip is set to.
HOSTS = re.compile(rb"(py" rb"pi|pythonhosted|download\.pytorch)\.(org|com|io)")


def run_python(code: str, *argv: str) -> str:
    """What `python -c code` prints at the root; its failure is the test's."""
    command = [sys.executable, "-c", code, *argv]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def num_docstring_lines(path: Path) -> int:
    """Lines with words in the module's docstring; those that draw something count as one."""
    found = DOCSTRING.match(path.read_text(encoding="utf-8"))  # to parse all of it takes longer
    lines = [line for line in found[1].splitlines() if line] if found else []
    return min(len(lines), 1) if path in DRAWN else len(lines)


def tracked_files() -> list[Path]:
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def test_the_folder_cuda_lets_other_cuda_packages_through(tmp_path: Path) -> None:
    (tmp_path / "cuda" / "fake_binding").mkdir(parents=True)  # a namespace package, as NVIDIA's is
    (tmp_path / "cuda" / "fake_binding" / "__init__.py").write_text("WORD = 'there'\n")
    code = "import sys; sys.path.append(sys.argv[1]); import cuda.fake_binding as b; print(b.WORD)"
    assert run_python(code, str(tmp_path)) == "there\n"


@pytest.mark.skipif(not importlib.util.find_spec("numba_cuda"), reason="numba-cuda not installed")
def test_the_folder_cuda_does_not_hide_nvidias() -> None:
    run_python("import cuda.bindings.driver")


def test_our_kernels_and_compiled_modules_are_importable() -> None:
    run_python("import luceasync.cuda, luceasync.cyext.names")


def test_kernels_in_cuda_are_installed() -> None:
    kinds = {path.suffix for path in (ROOT / "luceasync" / "kernels").glob("*.cu*")}
    asked = re.search(r'"luceasync.kernels": (\[.*?\])', (ROOT / "setup.py").read_text())
    assert asked and {f'"*{kind}"' for kind in kinds} == set(asked[1].strip("[]").split(", "))


def test_help_loads_neither_torch_nor_an_event_loop() -> None:
    code = """
import sys
from luceasync.cli.app import main
sys.argv = ["luceasync", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop
print(sorted({"asyncio", "torch", "numpy", "starlette"} & sys.modules.keys()))
"""
    assert run_python(code).endswith("[]\n")


def test_there_is_one_version() -> None:
    assert importlib.metadata.version("luceasync") == luceasync.__version__


def constrained_versions() -> dict[str, Version]:
    """What constraints.txt names, which is what the tests run with."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if "==" in line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def next_untested(name: str, tested: Version) -> Version:
    """The first version that may differ: after the major one, of 0.x and of these the minor one."""
    if tested.major == 0 or name in ("torch", "numpy"):
        return Version(f"{tested.major}.{tested.minor + 1}")
    return Version(str(tested.major + 1))


def installed_bounds() -> dict[str, SpecifierSet]:
    """What `pip install .` and the extra "cuda" ask for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = [*project["dependencies"], *project["optional-dependencies"]["cuda"]]
    return {canonicalize_name(r.name): r.specifier for r in map(Requirement, asked)}


@pytest.mark.parametrize(("name", "bounds"), installed_bounds().items())
def test_an_installation_gets_what_was_tested(name: str, bounds: SpecifierSet) -> None:
    tested = constrained_versions()[name]
    assert bounds.contains(tested)
    assert not bounds.contains(next_untested(name, tested))


def test_an_sdist_has_what_a_checkout_has() -> None:
    lines = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    grafted = {line.split()[1] for line in lines if line.startswith("graft ")}
    included = [word for line in lines if line.startswith("include ") for word in line.split()[1:]]
    by_setuptools = {"LICENSE", "pyproject.toml", "setup.py", ".gitignore", "MANIFEST.in"}
    left_out = [
        name
        for name in {path.relative_to(ROOT).parts[0] for path in tracked_files()}
        if name not in grafted | by_setuptools | {"luceasync"}
        and not any(Path(name).match(pattern) for pattern in included)
    ]
    assert left_out == []


def test_each_licence_file_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert all((ROOT / name).is_file() for name in [*project["license-files"], project["readme"]])


def test_only_a_gpu_needs_numba() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needing = {
        extra or "plain"
        for extra, asked in {
            None: project["dependencies"],
            **project["optional-dependencies"],
        }.items()
        if any(Requirement(line).name == "numba" for line in asked)
    }
    assert needing == {"cuda", "test"}


def test_containers_ask_their_own_server_for_their_health() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r'HEALTHCHECK .* CMD \["luceasync", "health"\]', text)
    # One of its own would know neither port nor TLS.
    assert "healthcheck" not in (ROOT / "compose.yaml").read_text(encoding="utf-8")


def test_the_first_process_of_a_container_is_an_init() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert re.search(r'^ENTRYPOINT \["tini", "-s", "--", "luceasync"\]$', text, re.MULTILINE)
    stages = re.split(r"^FROM ", text, flags=re.MULTILINE)
    runtimes = [stage for stage in stages if re.match(r"\S+ AS runtime-", stage)]
    assert len(runtimes) == 2
    assert all(re.search(r"apt-get install .*\btini\b", stage) for stage in runtimes)
    # One is enough.
    assert "init:" not in (ROOT / "compose.yaml").read_text(encoding="utf-8")


def test_a_module_says_in_a_few_lines_what_it_is() -> None:
    assert [path for path in SOURCES if not 1 <= num_docstring_lines(path) <= 5] == []


def test_a_file_stays_readable() -> None:
    longer = {path: path.read_bytes().count(b"\n") for path in SOURCES}
    longer = {path: count for path, count in longer.items() if count > MAX_LINES}
    assert longer == {}


def test_no_file_names_a_package_registry() -> None:
    naming = [path for path in tracked_files() if HOSTS.search(path.read_bytes())]
    assert naming == []


def test_tests_are_no_package() -> None:
    # A tests/cuda or an __init__.py would hide other packages of that name from the tests.
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    assert not (ROOT / "tests" / "cuda").exists()
