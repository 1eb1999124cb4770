"""How settings are read: flags > LUCEASYNC_* variables > TOML file > the defaults of config.py.

Flag, variable and TOML key are derived from a setting's name. Independent of the command line
library.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from luceasync.config import Config
from luceasync.errors import ConfigError
from luceasync.parsers import Setting

ENV_PREFIX = "LUCEASYNC_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"

# Read by the install scripts; not settings of a server, but may be set in its environment.
INSTALL_VARIABLES = ("LUCEASYNC_EXTRAS", "LUCEASYNC_TORCH_INDEX")

# Settings that protect a server. Empty variables are refused for these; elsewhere they count as
# unset: LUCEASYNC_API_KEY=${KEY:-} without a KEY would silently open the server to everybody.
PROTECTIONS = frozenset({"api-key", "api-key-file", "tls-cert", "tls-key", "allow-host"})

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Option:
    """A setting and the field that it sets. Its flag is `--a-b`, its variable `LUCEASYNC_A_B`, its
    TOML key `section.a_b`.
    """

    section: str
    field: str
    default: object
    setting: Setting

    @property
    def name(self) -> str:
        return self.setting.name

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.key.upper()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


def _declared() -> Iterable[Option]:
    defaults = Config()
    for section in fields(Config):
        for field in fields(getattr(defaults, section.name)):
            for setting in field.metadata["settings"]:
                yield Option(section.name, field.name, field.default, setting)


OPTIONS = tuple(_declared())

# Titles of the sections in --help, in this order.
SECTIONS: dict[str, str] = {section.name: section.metadata["title"] for section in fields(Config)}


@dataclass(frozen=True, slots=True)
class Assignment:
    """A value as the user wrote it; `origin` is the flag, the variable, or file and key."""

    option: Option
    origin: str
    value: object


def load_config(
    flags: Mapping[str, object], environ: Mapping[str, str], toml_path: Path | None
) -> Config:
    """Build the Config from flags > variables > TOML file > defaults.

    `flags` maps option names ("max-ctx") to the given text; None means not given. Reads the TOML
    file and the key file, nothing else. Logs a warning for unknown LUCEASYNC_* variables. Raises
    ConfigError: one line with the origin, the value and what is allowed.
    """
    for warning in unknown_variables(environ):
        log.warning("%s", warning)
    return _config(_from_toml(toml_path), _from_environ(environ), _from_flags(flags))


def config_of(settings: Mapping[str, object], toml_path: Path | None = None) -> Config:
    """Build the Config of a model in this process from settings > TOML file > defaults.

    `settings` maps keys ("max_ctx") to values as in a flag or a TOML file; None means not given.
    Environment variables are not read. Raises ConfigError like `load_config`, and for a setting
    that does not exist or that only a server has.
    """
    return _config(_from_toml(toml_path), _from_settings(settings))


def _config(*sources: Iterable[Assignment]) -> Config:
    """The Config of all assignments; later sources override earlier ones."""
    assigned: dict[str, Assignment] = {}
    for source in sources:
        assigned.update({each.option.name: each for each in source})
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for each in assigned.values():
        section, field, value = values[each.option.section], each.option.field, _parse(each)
        # Both settings of API keys set one field: their keys are combined.
        section[field] = section.get(field, ()) + value if field == "api_keys" else value
    for each in assigned.values():
        _refuse_alone(each, values)
    config = Config()
    sections = {name: replace(getattr(config, name), **values[name]) for name in SECTIONS}
    return replace(config, **sections)


def _parse(assignment: Assignment) -> Any:
    setting = assignment.option.setting
    try:
        return setting.parse(assignment.value)
    except (ValueError, OSError) as error:
        shown = "(hidden)" if setting.secret else repr(assignment.value)
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise ConfigError(
            f"{assignment.origin}: {shown} is not allowed{reason}; allowed: {setting.allowed}"
        ) from None


def _refuse_alone(assignment: Assignment, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a setting that has no effect without another one."""
    for other in OPTIONS:
        is_needed = other.name == assignment.option.setting.needs
        if is_needed and not values[other.section].get(other.field):
            given = "" if assignment.option.setting.switch else f"{assignment.value!r} is "
            raise ConfigError(f"{assignment.origin}: {given}not allowed without {other.flag}")


def _from_flags(flags: Mapping[str, object]) -> Iterable[Assignment]:
    by_name = {option.name: option for option in OPTIONS}
    for name, value in flags.items():
        if value is not None and value != []:
            yield Assignment(by_name[name], by_name[name].flag, value)


def _from_settings(settings: Mapping[str, object]) -> Iterable[Assignment]:
    by_key = {option.key: option for option in OPTIONS}
    own = [key for key, option in by_key.items() if option.section != "server"]
    for key, value in settings.items():
        if key not in by_key:
            near = get_close_matches(key, own, n=1, cutoff=0.0)
            raise ConfigError(f"{key}: there is no such setting; the nearest one is {near[0]}")
        if key not in own:
            raise ConfigError(f"{key}: only a server has this setting; there is none here")
        if value is not None:
            plain = str(value) if isinstance(value, Path) else value
            yield Assignment(by_key[key], key, plain)


def _from_environ(environ: Mapping[str, str]) -> Iterable[Assignment]:
    for option in OPTIONS:
        if environ.get(option.variable) == "" and option.name in PROTECTIONS:
            raise ConfigError(
                f"{option.variable}: it is empty, which would leave the server without the "
                f"protection that it names; allowed: {option.setting.allowed}, or no such variable"
            )
        if environ.get(option.variable):
            yield Assignment(option, option.variable, environ[option.variable])


def unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """A sentence for each unknown LUCEASYNC_* variable, with the most similar known name. Omits the
    value, which may be a secret.
    """
    known = [CONFIG_VARIABLE, *INSTALL_VARIABLES, *(option.variable for option in OPTIONS)]
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            yield f"{name} is not a setting and has no effect; the nearest one is {near[0]}"


def _from_toml(path: Path | None) -> Iterable[Assignment]:
    if path is None:
        return
    options = {(option.section, option.key): option for option in OPTIONS}
    for section, table in _read_toml(path).items():
        known = [key for table_name, key in options if table_name == section]
        if not known or not isinstance(table, dict):
            allowed = ", ".join(sorted(f"[{name}]" for name in SECTIONS))
            raise ConfigError(f"{path}: unknown table or key {section!r}; allowed: {allowed}")
        for key, value in table.items():
            if key not in known:
                # Without the value: even a misspelt api_key holds a secret.
                raise ConfigError(
                    f"{path}: unknown key {section}.{key}; "
                    f"allowed in [{section}]: {', '.join(known)}"
                )
            yield Assignment(options[section, key], f"{path}: {section}.{key}", value)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not TOML: {error}") from None
