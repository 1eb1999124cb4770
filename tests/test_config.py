"""Flags, variables and a TOML file set the same settings, in that order of precedence."""

from __future__ import annotations

import logging
import re
import tomllib
from pathlib import Path

import pytest

from luceasync.config import (
    BUNDLED_DRAFT_DIR,
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    DraftConfig,
)
from luceasync.errors import ConfigError
from luceasync.options import OPTIONS, PROTECTIONS, Option, load_config

EXAMPLE = Path(__file__).parents[1] / "docs" / "luceasync.toml"

# A value other than the default for every setting, as text.
TEXTS = {
    "model-dir": "/models/x", "model-name": "x", "dtype": "fp32", "target-device": "cpu",
    "target-devices": "cuda:0,cpu", "target-layer-split": "0.3,0.7", "peer-access": "off",
    "expert-memory": "4G",
    "parallel": "2", "max-ctx": "8K", "prefill-chunk": "128", "max-queue": "0", "host": "::",
    "prefix-cache-memory": "0", "kv-cache-dir": "/cache", "kv-cache-budget": "1M",
    "kv-cache-min-tokens": "0", "kv-cache-shared": "on", "snapshot-interval": "64",
    "kv-store": "file:///nodes", "kv-store-key-file": "/secret",
    "trust-cache-salt": "on",
    "draft": "none", "draft-device": "cpu", "draft-ctx-max": "4K", "draft-swa-window": "1K",
    "draft-block": "2", "draft-lookup": "off", "draft-ipc-bin": "/bin/backend",
    "ddtree": "true", "ddtree-budget": "1", "port": "0", "api-key": "one,two", "admin-key": "root",
    "max-body": "1M", "keep-alive": "2.5", "graceful-timeout": "0", "log-level": "debug",
    "trust-special-tokens": "on", "tool-format": "glm-xml", "reasoning-format": "none",
    "allow-host": "chat.lan,[fd00::1]", "allow-origin": "http://localhost:3000,null",
    "target-shard-ipc-bin": "hip=/rocm/bin/backend,/bin/other", "target-shard-ipc": "always",
    "target-shard-tls": "/etc/box1.pem",
    "ipc-transport": "stream", "tls-cert": "/cert.pem", "tls-key": "/key.pem",
    "kvflash": "8K", "kvflash-policy": "lru", "kvflash-tau": "128",
    "kvflash-pin-spans": "0:512,1K:2K",
}  # fmt: skip
TEXT_OPTIONS = [option for option in OPTIONS if option.name in TEXTS]


def value_of(config: Config, option: Option) -> object:
    return getattr(getattr(config, option.section), option.field)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def refusal(flags=None, environ=None, toml: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(flags or {}, environ or {}, toml)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_settings_the_defaults_hold():
    config = load_config({}, {"PATH": "/bin", "LUCEASYNC_EXTRAS": "cuda"}, None)
    assert config == Config()
    assert config.model.model_dir == BUNDLED_MODEL_DIR


def test_every_setting_is_tested():
    of_files = {"api-key-file", "client-secret-file"}
    assert {option.name for option in OPTIONS} == TEXTS.keys() | of_files


def needed_by(option: Option) -> dict[str, str]:
    """The settings without which it is refused, and those that these need."""
    by_name = {other.name: other for other in OPTIONS}
    found: dict[str, str] = {}
    while (name := option.setting.needs) is not None and name not in found:
        found[name] = TEXTS[name]
        option = by_name[name]
    return found


@pytest.mark.parametrize("option", TEXT_OPTIONS, ids=lambda option: option.name)
def test_flag_variable_and_toml_set_the_same_thing(option, tmp_path):
    text = TEXTS[option.name]
    toml = write(tmp_path / "c.toml", f'[{option.section}]\n{option.key} = "{text}"\n')
    rest = needed_by(option)
    by_flag = load_config(rest | {option.name: text}, {}, None)
    by_variable = load_config(rest, {option.variable: text}, None)
    by_toml = load_config(rest, {}, toml)
    assert by_flag == by_variable == by_toml
    assert value_of(by_flag, option) != value_of(Config(), option)


def test_toml_may_use_its_own_types(tmp_path):
    text = """
    [placement]
    target_devices = ["cuda:0", "cpu"]
    target_layer_split = [3, 7.5]
    [engine]
    max_ctx = 4096
    [server]
    keep_alive = 2
    api_key = ["one"]
    """
    config = load_config({}, {}, write(tmp_path / "c.toml", text))
    assert config.placement.devices == ("cuda:0", "cpu")
    assert config.placement.layer_split == (3.0, 7.5)
    assert config.engine.max_ctx_tokens == 4096
    assert (config.server.keep_alive_s, config.server.api_keys) == (2.0, ("one",))


def test_flags_win_over_variables_and_variables_over_toml(tmp_path):
    toml = write(tmp_path / "c.toml", "[engine]\nparallel = 1\nmax_queue = 1\nmax_ctx = 64\n")
    environ = {"LUCEASYNC_PARALLEL": "2", "LUCEASYNC_MAX_QUEUE": "2"}
    engine = load_config({"parallel": "3", "max-queue": None}, environ, toml).engine
    assert (engine.parallel, engine.max_queue, engine.max_ctx_tokens) == (3, 2, 64)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "fp16"), ("target-devices", "cuda:0,,cpu"), ("target-layer-split", "1,0"),
        ("target-layer-split", "1,nan"), ("parallel", "0"), ("parallel", "1.5"), ("parallel", "K"),
        ("max-ctx", "63"), ("max-ctx", "+128"), ("max-ctx", "1_024"), ("max-ctx", "9" * 5000),
        ("prefill-chunk", "0"), ("max-queue", "-1"), ("port", "65536"),
        ("port", "http"), ("max-body", "0"), ("keep-alive", "0"), ("keep-alive", "inf"),
        ("graceful-timeout", "-1"), ("log-level", "loud"), ("prefix-cache-memory", "-1"),
        ("kv-cache-budget", "1K"), ("snapshot-interval", "63"), ("trust-cache-salt", "maybe"),
        ("allow-host", "chat.lan:8000"), ("allow-host", "http://chat.lan"), ("allow-host", "a,,b"),
        ("allow-origin", "chat.lan"), ("allow-origin", "http://chat.lan/"),
        ("draft-ctx-max", "0"), ("draft-block", "1"), ("draft-block", "65"), ("ddtree", "2"),
        ("ddtree-budget", "0"), ("ddtree-budget", "257"),
        ("expert-memory", "0"), ("expert-memory", "half"), ("kvflash", "63"), ("kvflash", "all"),
        ("kvflash-policy", "lfu"), ("kvflash-tau", "0"),
        ("kvflash-pin-spans", "64"), ("kvflash-pin-spans", "64:64"), ("kvflash-pin-spans", "0:64,"),
    ],
)  # fmt: skip
def test_a_refusal_names_origin_value_and_allowed_values(name, value, tmp_path):
    [option] = [option for option in OPTIONS if option.name == name]
    toml = write(tmp_path / "c.toml", f'[{option.section}]\n{option.key} = "{value}"\n')
    for words, where in (
        (refusal({name: value}), f"--{name}: "),
        (refusal(environ={option.variable: value}), f"{option.variable}: "),
        (refusal(toml=toml), f"{toml}: {option.section}.{option.key}: "),
    ):
        assert words == f"{where}{value!r} is not allowed; allowed: {option.setting.allowed}"


@pytest.mark.parametrize(
    "line", ["parallel = true", "parallel = 1.5", "parallel = [1]", "parallel = {}"]
)
def test_toml_values_of_another_type_are_refused(line, tmp_path):
    assert "engine.parallel: " in refusal(toml=write(tmp_path / "c.toml", f"[engine]\n{line}\n"))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[engine]\nparalel = 4\n", "unknown key engine.paralel; "),
        ("[motor]\nparallel = 4\n", "'motor'"),
        ("parallel = 4\n", "'parallel'"),
        ("engine = 4\n", "'engine'"),
        ("[engine\n", "is not TOML"),
    ],
)
def test_an_unknown_key_or_broken_toml_is_refused(text, named, tmp_path):
    assert named in refusal(toml=write(tmp_path / "c.toml", text))


def test_a_missing_toml_file_is_refused(tmp_path):
    assert refusal(toml=tmp_path / "none.toml").startswith("--config: cannot read")


def test_keys_of_flags_and_file_add_up(tmp_path):
    keys = write(tmp_path / "keys", "# mine\nthree\n\n  four  \n")
    config = load_config({"api-key": ["one", "two"], "api-key-file": str(keys)}, {}, None)
    assert set(config.server.api_keys) == {"one", "two", "three", "four"}


@pytest.mark.parametrize("content", [None, "# only a comment\n"])
def test_a_key_file_without_keys_is_refused(content, tmp_path):
    path = tmp_path / "keys"
    if content is not None:
        write(path, content)
    assert refusal({"api-key-file": str(path)}).startswith(f"--api-key-file: '{path}'")


@pytest.mark.parametrize("name", sorted(PROTECTIONS))
def test_an_empty_variable_of_a_protection_is_refused(name):
    variable = f"LUCEASYNC_{name.upper().replace('-', '_')}"
    assert refusal(environ={variable: ""}).startswith(f"{variable}: it is empty, ")


def test_any_other_empty_variable_counts_as_not_set():
    environ = {option.variable: "" for option in OPTIONS if option.name not in PROTECTIONS}
    assert load_config({}, environ, None) == Config()


def test_a_key_file_readable_by_others_is_used_with_a_warning(tmp_path, caplog):
    path = write(tmp_path / "keys", "one\n")
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING, "luceasync"):
        assert load_config({"api-key-file": str(path)}, {}, None).server.api_keys == ("one",)
    assert "chmod 600" in caplog.text


def test_keys_are_never_shown(tmp_path):
    config = load_config({"api-key": ["sesame"]}, {}, None)
    misspelt = write(tmp_path / "c.toml", '[server]\napi_kye = "sesame"\n')
    shown = [repr(config), refusal({"api-key": ["sesame", ""]}), refusal(toml=misspelt)]
    assert not any("sesame" in words for words in shown)


def test_an_unknown_variable_is_reported_with_the_nearest_name_and_without_its_value(caplog):
    assert load_config({}, {"LUCEASYNC_APIKEY": "sesame"}, None) == Config()
    [record] = caplog.records
    assert record.getMessage() == (
        "LUCEASYNC_APIKEY is not a setting and has no effect; the nearest one is LUCEASYNC_API_KEY"
    )
    assert "sesame" not in caplog.text


def test_other_variables_and_those_of_the_scripts_are_not_reported(caplog):
    load_config({}, {"PATH": "/", "LUCEASYNC_EXTRAS": "cuda", "LUCEASYNC_CONFIG": "c"}, None)
    assert not caplog.records


def test_the_example_file_sets_the_defaults():
    assert load_config({}, {}, EXAMPLE) == Config()


def test_the_example_file_has_every_setting_with_an_allowed_value(tmp_path):
    text = re.sub(r"^# (?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    named = {(name, key) for name, table in tomllib.loads(text).items() for key in table}
    assert named == {(option.section, option.key) for option in OPTIONS}
    keys = write(tmp_path / "keys", "one\n")
    text = re.sub(r"(?<=y_file = |t_file = ).*", f'"{keys}"', text)
    load_config({}, {}, write(tmp_path / "c.toml", text))


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("kv-cache-budget", "1G", "--kv-cache-dir"),
        ("kv-cache-min-tokens", "9", "--kv-cache-dir"),
        ("kv-cache-shared", "on", "--kv-cache-dir"),
        ("kv-store", "s3://bucket/nodes", "--kv-cache-dir"),
        ("kv-store-key-file", "/secret", "--kv-store"),
        ("ddtree-budget", "8", "--ddtree"),
        ("kvflash-policy", "lru", "--kvflash"),
        ("kvflash-tau", "8", "--kvflash"),
        ("kvflash-pin-spans", "0:64", "--kvflash"),
    ],
)
def test_a_setting_without_the_one_it_needs_is_refused(name, value, needed):
    given = "" if value == "on" else f"{value!r} is "  # a switch has no value
    assert refusal({name: value}) == f"--{name}: {given}not allowed without {needed}"


def test_a_switch_that_is_off_does_not_count_as_given():
    assert "without --ddtree" in refusal({"ddtree": False, "ddtree-budget": "8"})


def test_a_switch_is_true_or_false_in_toml_and_a_flag_turns_it_off(tmp_path):
    toml = write(tmp_path / "c.toml", "[draft]\nddtree = true\n[cache]\ntrust_cache_salt = false\n")
    config = load_config({}, {}, toml)
    assert (config.draft.ddtree, config.cache.trust_cache_salt) == (True, False)
    assert load_config({"ddtree": False}, {}, toml).draft == DraftConfig()


def test_only_the_bundled_model_has_a_default_drafter():
    assert Config().drafter_dir == BUNDLED_DRAFT_DIR
    assert load_config({"model-dir": "/m"}, {}, None).drafter_dir is None
    assert load_config({"model-dir": "/m", "draft": "/d"}, {}, None).drafter_dir == Path("/d")
    assert load_config({"draft": "none"}, {}, None).drafter_dir is None
    assert load_config({"draft": "./none"}, {}, None).drafter_dir == Path("none")
    assert load_config({"draft": "lookup"}, {}, None).drafter_dir is None


def test_a_cache_directory_alone_is_enough():
    assert load_config({"kv-cache-dir": "/c"}, {}, None).cache == CacheConfig(cache_dir=Path("/c"))
