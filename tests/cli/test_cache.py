"""The cache commands on real node files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from luceasync.cli.app import app
from luceasync.errors import ConfigError
from tests.disk_cache.node_files import END_SHAPES, ROW_SHAPES, contents_of, end_of, file_of

DAY_S = 86400
ROOT, MIDDLE, TIP, BRANCH = (f"{digit}{'0' * 15}" for digit in "abcd")
CHAIN = {ROOT: "", MIDDLE: ROOT, TIP: MIDDLE, BRANCH: ROOT}
DEPTH = {ROOT: 0, MIDDLE: 1, TIP: 2, BRANCH: 1}
AGE_DAYS = {ROOT: 9, MIDDLE: 5, TIP: 4, BRANCH: 2}


def put(cache: Path, namespace: str, key: str, **more: object) -> Path:
    """Write a node of 17 tokens at its place in the tree ROOT - MIDDLE - TIP, ROOT - BRANCH."""
    begin = 17 * DEPTH[key]
    fields = {"parent": CHAIN[key], "begin": begin, "end": begin + 17, **more}
    path = cache / namespace / f"{key}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file_of(contents_of(), namespace=namespace, key=key, **fields))
    used_s = time.time() - AGE_DAYS[key] * DAY_S - 60
    os.utime(path, (used_s, used_s))
    return path


def put_apart(cache: Path, namespace: str, key: str) -> Path:
    """Write the same node as two files; returns the path of its end."""
    path = put(cache, namespace, key)
    used_s = path.stat().st_mtime
    fields = {"namespace": namespace, "key": key, "parent": CHAIN[key]}
    fields |= {"begin": 17 * DEPTH[key], "end": 17 * DEPTH[key] + 17}
    path.write_bytes(file_of({name: contents_of()[name] for name in ROW_SHAPES}, **fields))
    os.utime(path, (used_s, used_s))
    end = path.with_suffix(".end")
    encoded = end_of({name: contents_of()[name] for name in END_SHAPES}, **fields)
    end.write_bytes(b"".join((encoded.header, *encoded.buffers)))
    return end


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory with the tree in one namespace, and its root in another."""
    for key in CHAIN:
        put(tmp_path, "feed0123", key)
    put(tmp_path, "beef", ROOT)
    (tmp_path / "digests.json").write_text("{}")
    return tmp_path


def run(cache: Path, *arguments: str, answer: str = "") -> Result:
    words = ["cache", *arguments, "--kv-cache-dir", str(cache)]
    return CliRunner().invoke(app, words, input=answer, env={"COLUMNS": "80"})


def done(cache: Path, *arguments: str) -> str:
    result = run(cache, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def keys(cache: Path, namespace: str = "feed0123") -> set[str]:
    return {path.stem for path in (cache / namespace).glob("*.safetensors")}


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_ls_lists_namespaces_most_recently_used_first(cache: Path) -> None:
    lines = done(cache, "ls").splitlines()
    assert lines[0].split() == ["namespace", "nodes", "bytes", "last", "used"]
    assert lines[1].split()[:2] + lines[1].split()[-3:] == ["feed0123", "4", "2", "days", "ago"]
    assert lines[2].split()[0] == "beef"
    assert lines[3].split()[:2] == ["total", "5"]


def test_ls_of_a_namespace_lists_nodes_after_their_parents(cache: Path) -> None:
    lines = done(cache, "ls", "feed").splitlines()
    assert [line.split()[0] for line in lines[1:]] == [k[:12] for k in (ROOT, MIDDLE, TIP, BRANCH)]
    assert lines[3].split()[1:4] == [MIDDLE[:12], "[34,", "51)"]
    assert all("yes" in line.split() for line in lines[1:])
    assert max(map(len, lines)) <= 80


def test_ls_as_json(cache: Path) -> None:
    printed = json.loads(done(cache, "ls", "--json"))["namespaces"]
    sizes = [path.stat().st_size for path in (cache / "feed0123").iterdir()]
    assert (printed[0]["num_nodes"], printed[0]["num_bytes"]) == (4, sum(sizes))
    tip = json.loads(done(cache, "ls", "feed0123", "--json"))["nodes"][2]
    assert (tip["key"], tip["parent"], tip["begin"], tip["end"]) == (TIP, MIDDLE, 34, 51)
    assert tip["parts"] == ["features", "span", "state"]
    assert tip["generated"] is True


def test_an_end_in_its_own_file_counts_with_its_node(cache: Path) -> None:
    end = put_apart(cache, "feed0123", TIP)
    printed = json.loads(done(cache, "ls", "--json"))["namespaces"]
    sizes = [path.stat().st_size for path in (cache / "feed0123").iterdir()]
    assert (printed[0]["num_nodes"], printed[0]["num_bytes"]) == (4, sum(sizes))
    tip = json.loads(done(cache, "ls", "feed0123", "--json"))["nodes"][2]
    assert tip["parts"] == ["features", "span", "state"]
    assert tip["end_file_bytes"] == end.stat().st_size
    text = done(cache, "show", "c")
    assert "ls1_delta.2" in text
    assert max(map(len, text.splitlines())) <= 80
    damage(end)
    result = run(cache, "verify", "--namespace", "feed0123")
    assert result.exit_code == 1
    assert "its end alone" in result.stdout
    assert (keys(cache), end.exists()) == ({ROOT, MIDDLE, TIP, BRANCH}, False)
    assert "5 nodes intact" in done(cache, "verify")


def test_an_end_is_removed_with_its_node_and_without(cache: Path) -> None:
    ends = [put_apart(cache, "feed0123", key) for key in (TIP, BRANCH)]
    done(cache, "prune", "--older-than", "3")
    assert (keys(cache), [end.exists() for end in ends]) == ({ROOT, BRANCH}, [False, True])
    (cache / "feed0123" / f"{BRANCH}.safetensors").unlink()
    done(cache, "clear", "--yes")
    assert not list(cache.glob("*/*.end"))


def test_ls_of_an_empty_directory(tmp_path: Path) -> None:
    assert done(tmp_path, "ls").split() == "namespace nodes bytes last used total 0 0 B".split()


def test_nodes_of_another_schema_are_listed_as_such(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr("luceasync.disk_cache.codec.SCHEMA", "luceasync.node.1")
        put(cache, "beef", BRANCH)
    assert "another schema" in done(cache, "ls", "beef")
    assert "1 of another schema" in done(cache, "verify")


def test_show_prints_contents_and_chain(cache: Path) -> None:
    text = done(cache, "show", "c")
    for words in (TIP, "[34, 51)", "[0, 17)", "ls1_delta.2", "2 x 4 x 4", "generated  yes"):
        assert words in text
    assert max(map(len, text.splitlines())) <= 80


def test_show_as_json_has_the_chain_and_every_tensor(cache: Path) -> None:
    printed = json.loads(done(cache, "show", TIP, "--json"))
    assert [node["key"] for node in printed["chain"]] == [ROOT, MIDDLE, TIP]
    assert printed["num_tokens"] == 17
    shapes = {tensor["name"]: tensor["shape"] for tensor in printed["tensors"]}
    assert shapes["tokens"] == [17]
    assert (shapes["ls0_attn_k.0"], printed["split"]) == ([17, 2, 16], [0, 2])


def test_show_reports_a_broken_chain(cache: Path) -> None:
    (cache / "feed0123" / f"{MIDDLE}.safetensors").unlink()
    assert "no request can use it" in done(cache, "show", TIP)


def test_a_missing_namespace_or_node_is_one_line_and_exit_1(cache: Path) -> None:
    for arguments in (["show", "99"], ["ls", "99"], ["clear", "--namespace", "99"]):
        result = run(cache, *arguments)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith("luceasync: no n")
        assert result.stderr.count("\n") == 1


def test_show_of_a_damaged_node_is_exit_1(cache: Path) -> None:
    path = put(cache, "feed0123", TIP)
    path.write_bytes(path.read_bytes()[:-1])
    result = run(cache, "show", "c")
    assert result.exit_code == 1
    assert f"node feed0123/{TIP}" in result.stderr


def test_an_ambiguous_key_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match="KEY a: 2 nodes begin with it"):
        raise run(cache, "show", "a").exception
    assert ROOT in done(cache, "show", "a", "--namespace", "beef")


def test_verify_of_intact_nodes_is_exit_0(cache: Path) -> None:
    assert done(cache, "verify").startswith("5 nodes intact, 0 damaged")


def test_verify_quarantines_damaged_nodes_and_exits_with_1(cache: Path) -> None:
    damage(cache / "feed0123" / f"{TIP}.safetensors")
    result = run(cache, "verify")
    assert result.exit_code == 1
    assert f"damaged: feed0123/{TIP}: " in result.stdout
    assert "4 nodes intact, 1 damaged" in result.stdout
    assert keys(cache) == {ROOT, MIDDLE, BRANCH}
    assert len(list((cache / "feed0123" / "quarantine").iterdir())) == 1
    assert run(cache, "verify").exit_code == 0


def test_verify_counts_intact_nodes_below_a_damaged_one(cache: Path) -> None:
    damage(cache / "feed0123" / f"{MIDDLE}.safetensors")
    for code in (1, 0):
        result = run(cache, "verify")
        assert result.exit_code == code
        assert "1 intact node below a missing parent: no request can use" in result.stdout


def test_prune_by_age_keeps_ancestors_of_kept_nodes(cache: Path) -> None:
    text = done(cache, "prune", "--older-than", "3", "--namespace", "feed")
    assert text.startswith("2 nodes removed")
    assert keys(cache) == {ROOT, BRANCH}
    assert keys(cache, "beef") == {ROOT}


def test_prune_to_a_budget_removes_the_least_recently_used_leaf_first(cache: Path) -> None:
    size = (cache / "beef" / f"{ROOT}.safetensors").stat().st_size
    done(cache, "prune", "--budget", str(3 * size))
    assert (keys(cache), keys(cache, "beef")) == ({ROOT, MIDDLE, BRANCH}, set())
    done(cache, "prune", "--budget", "0K")
    assert keys(cache) == set()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prune"], "expected --budget BYTES or --older-than DAYS"),
        (["prune", "--budget", "much"], "--budget: 'much' is not allowed"),
        (["ls", "--kv-cache-dir", "/none"], "--kv-cache-dir /none: expected an existing directory"),
    ],
)
def test_a_bad_flag_is_one_line(cache: Path, arguments: list[str], words: str) -> None:
    error = CliRunner().invoke(
        app, ["cache", *arguments], env={"LUCEASYNC_KV_CACHE_DIR": str(cache)}
    )
    assert isinstance(error.exception, ConfigError)
    assert words in str(error.exception)


def test_a_missing_directory_flag_is_refused() -> None:
    error = CliRunner().invoke(app, ["cache", "ls"]).exception
    assert str(error).startswith("--kv-cache-dir: not given")


def test_the_directory_comes_from_the_environment_or_the_file(cache: Path, tmp_path: Path) -> None:
    toml = tmp_path / "c.toml"
    toml.write_text(f'[cache]\nkv_cache_dir = "{cache}"\n')
    for arguments, env in (
        (["--config", str(toml)], {}),
        ([], {"LUCEASYNC_KV_CACHE_DIR": str(cache)}),
    ):
        result = CliRunner().invoke(app, ["cache", "ls", *arguments], env=env)
        assert "feed0123" in result.stdout


@pytest.mark.parametrize(("answer", "code", "left"), [("n\n", 1, 4), ("", 1, 4), ("y\n", 0, 0)])
def test_clear_asks_first(cache: Path, answer: str, code: int, left: int) -> None:
    result = run(cache, "clear", answer=answer)
    assert result.exit_code == code
    assert "Remove 5 nodes, " in result.stdout
    assert len(keys(cache)) == left


def test_clear_of_one_namespace_leaves_others_and_foreign_files(cache: Path) -> None:
    (cache / "feed0123" / "README").touch()
    damage(cache / "feed0123" / f"{TIP}.safetensors")
    run(cache, "verify")
    assert done(cache, "clear", "--namespace", "feed", "--yes").startswith("3 nodes removed")
    assert [path.name for path in (cache / "feed0123").iterdir()] == ["README"]
    assert keys(cache, "beef") == {ROOT}
    done(cache, "clear", "--yes")
    assert {path.name for path in cache.iterdir()} == {"feed0123", "digests.json"}


# --- a store --------------------------------------------------------------------------------------


@pytest.fixture
def store(cache: Path) -> str:
    """The nodes of `cache` in a store, with what one namespace depends on."""
    for path in cache.glob("*/*.safetensors"):
        name = cache / "store" / path.parent.name / path.stem[:2] / path.name
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(path.read_bytes())
        os.utime(name, (path.stat().st_mtime, path.stat().st_mtime))
    (cache / "store/feed0123/namespace.json").write_text('{"kv_dtype": "fp32"}')
    return f"file://{cache}/store"


def of_store(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cache", *arguments], env={"COLUMNS": "80"})


def test_ls_of_a_store_lists_its_namespaces_without_a_directory(store: str) -> None:
    told = json.loads(of_store("ls", "--kv-store", store, "--json").stdout)["namespaces"]
    assert [(each["namespace"], each["num_nodes"]) for each in told] == [
        ("beef", 1),
        ("feed0123", 4),
    ]
    text = of_store("ls", "fee", "--kv-store", store).stdout
    assert "feed0123" in text and "beef" not in text and "2 days" in text
    missing = of_store("ls", "none", "--kv-store", store)
    assert missing.exit_code == 1 and "no namespace none in file://" in missing.output


def test_prune_of_a_store_is_by_age_and_leaves_what_is_no_node(cache: Path, store: str) -> None:
    assert (
        "2 objects removed"
        in of_store(
            "prune", "--kv-store", store, "--older-than", "4.5", "--namespace", "feed"
        ).stdout
    )
    left = {path.stem for path in cache.glob("store/feed0123/*/*.safetensors")}
    assert left == {TIP, BRANCH}
    assert (cache / "store/feed0123/namespace.json").exists()
    assert [*cache.glob("store/beef/*/*")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ls", "--kv-store", "ftp://x"], "--kv-store ftp://x: expected a URL with one of"),
        (["ls", "--kv-store", "file:///missing"], "there is no such directory"),
        (["prune", "--kv-store", "file:///missing", "--older-than", "1"], "no such directory"),
        (["prune", "--kv-store", "file:///tmp/x", "--budget", "1G"], "expected --older-than DAYS"),
        (["prune", "--kv-store", "file:///tmp/x"], "expected --older-than DAYS"),
        (["ls", "--kv-store", "file:///tmp", "--kv-cache-dir", "/x"], "are both given; one is"),
        (
            ["prune", "--kv-store", "s3://a", "--kv-cache-dir", "/x", "--older-than", "1"],
            "are both given; one is",
        ),
    ],
)
def test_a_bad_store_is_one_line(arguments: list[str], words: str) -> None:
    error = of_store(*arguments).exception
    assert isinstance(error, ConfigError)
    assert words in str(error) and "\n" not in str(error)
