"""What the user asked for: frozen sections, built once from flags > LUCEASYNC_* > TOML > defaults.

Owns defaults and precedence. Knows nothing of devices that exist or of what a model needs: a value
that is well-formed but cannot be honoured is refused by the part that would have to honour it.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from luceasync.errors import ConfigError
from luceasync.options import OPTIONS
from luceasync.parsers import CONFIG_VARIABLE, ENV_PREFIX, Option

BUNDLED_MODEL_DIR = Path(__file__).parent / "assets" / "stdlib-15m"
BUNDLED_DRAFT_DIR = Path(__file__).parent / "assets" / "stdlib-15m-dflash"

# Read by the scripts that install: they are no settings of a server, and may be set beside it.
INSTALL_VARIABLES = ("LUCEASYNC_EXTRAS", "LUCEASYNC_TORCH_INDEX")

log = logging.getLogger(__name__)

DtypeName = Literal["auto", "bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model and in which precision. `names`: it is served under each, the first is its own;
    none, or "*" for all first: its own is the directory's. `trust_special_tokens`: what messages
    say may become control tokens. `tool_format`, `reasoning_format`: how its answers are read.
    """

    model_dir: Path = BUNDLED_MODEL_DIR
    dtype: DtypeName = "auto"
    names: tuple[str, ...] = ()
    trust_special_tokens: bool = False
    tool_format: str = "auto"
    reasoning_format: str = "auto"


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Where the target's layers go: `devices` or `device`. Neither: this machine's best one.
    `ipc_bins`: what runs devices in processes of their own, each a path or BACKEND=PATH; `ipc`:
    which devices these are.
    """

    devices: tuple[str, ...] = ()
    layer_split: tuple[float, ...] | None = None
    peer_access: Literal["auto", "on", "off"] = "auto"
    device: str | None = None
    ipc_bins: tuple[str, ...] = ()
    ipc: Literal["auto", "always"] = "auto"
    ipc_transport: Literal["auto", "shared", "stream"] = "auto"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. None: chosen to fit the memory that is free (`luceasync plan` tells
    how).
    """

    parallel: int | None = None
    max_ctx_tokens: int | None = None
    prefill_chunk_tokens: int | None = None
    max_queue: int = 64


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Which computed prefixes are kept, and where. `memory_bytes` None: a quarter of free RAM, 0:
    none. `cache_dir` None: not on disk. `budget_bytes` None: half of that disk, as far as it
    is free or holds nodes.
    """

    memory_bytes: int | None = None
    cache_dir: Path | None = None
    budget_bytes: int | None = None
    min_tokens: int = 256
    interval_tokens: int = 2048
    trust_cache_salt: bool = False


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Speculation. `draft_dir` None: see `Config.drafter_dir`; `ipc_bin`: what runs the drafter in
    a process of its own, None: this process does. Other None: by drafter and model.
    """

    draft_dir: Path | Literal["none"] | None = None
    device: str | None = None
    ipc_bin: Path | None = None
    ctx_max_tokens: int | None = None
    swa_window_tokens: int | None = None
    block: int | None = None
    ddtree: bool = False
    ddtree_budget: int | None = None


@dataclass(frozen=True, slots=True)
class KvFlashConfig:
    """How much of each lane's context stays on the devices. `pool_tokens` None: all of it. `pins`:
    spans of tokens `[begin, end)` that stay.
    """

    pool_tokens: int | Literal["auto"] | None = None
    policy: Literal["qk", "drafter", "lru"] = "qk"
    tau_tokens: int = 64
    pins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP side. No API keys: everybody who reaches the port is served. `admin_keys` let
    whoever has one look through what is kept; none: nobody may. `allow_hosts`: names
    that the server may be asked for beside its own; `allow_origins`: whose web pages may use it.
    `tls_cert` and `tls_key`, both or neither: HTTPS.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    allow_hosts: tuple[str, ...] = ()
    allow_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    keep_alive_s: float = 15.0
    graceful_timeout_s: float = 30.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything, by section; each part of luceasync gets its own section only."""

    model: ModelConfig = field(default_factory=ModelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    kvflash: KvFlashConfig = field(default_factory=KvFlashConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    @property
    def drafter_dir(self) -> Path | None:
        """The drafter to load: the one asked for, else the bundled model's own; None: none."""
        if self.draft.draft_dir == "none":
            return None
        own = BUNDLED_DRAFT_DIR if self.model.model_dir == BUNDLED_MODEL_DIR else None
        return self.draft.draft_dir or own


@dataclass(frozen=True, slots=True)
class Setting:
    """A value as somebody wrote it; `origin` is the flag, the variable, or file and key."""

    option: Option
    origin: str
    value: object


def load_config(
    flags: Mapping[str, object], environ: Mapping[str, str], toml_path: Path | None
) -> Config:
    """Build the Config from flags > variables > TOML file > defaults.

    `flags` maps option names ("max-ctx") to what was typed; None counts as not given. Reads the
    TOML file and the key file, nothing else. Raises ConfigError: one line naming where, the value,
    what is allowed. Warns of variables that set nothing.
    """
    for words in unknown_variables(environ):
        log.warning("%s", words)
    settings: dict[str, Setting] = {}
    for source in (_from_toml(toml_path), _from_environ(environ), _from_flags(flags)):
        settings.update({setting.option.name: setting for setting in source})
    values: dict[str, dict[str, Any]] = {section.name: {} for section in fields(Config)}
    for setting in settings.values():
        _place(values[setting.option.section], setting.option.field, _parse(setting))
    for setting in settings.values():
        _refuse_alone(setting, values)
    return Config(
        model=ModelConfig(**values["model"]),
        placement=PlacementConfig(**values["placement"]),
        engine=EngineConfig(**values["engine"]),
        cache=CacheConfig(**values["cache"]),
        draft=DraftConfig(**values["draft"]),
        kvflash=KvFlashConfig(**values["kvflash"]),
        server=ServerConfig(**values["server"]),
    )


def _place(section: dict[str, Any], field: str, value: Any) -> None:
    """Put `value` under `field`; the two options that give API keys add up."""
    section[field] = section.get(field, ()) + value if field == "api_keys" else value


def _parse(setting: Setting) -> Any:
    option = setting.option
    try:
        return option.parse(setting.value)
    except (ValueError, OSError) as error:
        shown = "(hidden)" if option.secret else repr(setting.value)
        reason = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""
        raise ConfigError(
            f"{setting.origin}: {shown} is not allowed{reason}; allowed: {option.allowed}"
        ) from None


def _refuse_alone(setting: Setting, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError for a setting that means nothing without another one."""
    for other in OPTIONS:
        if other.name == setting.option.needs and not values[other.section].get(other.field):
            raise ConfigError(
                f"{setting.origin}: {setting.value!r} is not allowed without {other.flag}"
            )


def _from_flags(flags: Mapping[str, object]) -> Iterable[Setting]:
    by_name = {option.name: option for option in OPTIONS}
    for name, value in flags.items():
        if value is not None and value != []:
            yield Setting(by_name[name], by_name[name].flag, value)


def _from_environ(environ: Mapping[str, str]) -> Iterable[Setting]:
    for option in OPTIONS:
        if environ.get(option.variable):
            yield Setting(option, option.variable, environ[option.variable])


def unknown_variables(environ: Mapping[str, str]) -> Iterable[str]:
    """A sentence for each LUCEASYNC_* variable that is none: its name, which may be misspelt, and
    the nearest one that there is. No value: it may be a secret.
    """
    known = [CONFIG_VARIABLE, *INSTALL_VARIABLES, *(option.variable for option in OPTIONS)]
    for name in sorted(environ):
        if name.startswith(ENV_PREFIX) and name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)
            yield f"{name} is not a setting and sets nothing; the nearest one is {near[0]}"


def _from_toml(path: Path | None) -> Iterable[Setting]:
    if path is None:
        return
    options = {(option.section, option.key): option for option in OPTIONS}
    for section, table in _read_toml(path).items():
        known = [key for table_name, key in options if table_name == section]
        if not known or not isinstance(table, dict):
            allowed = ", ".join(sorted({f"[{option.section}]" for option in OPTIONS}))
            raise ConfigError(f"{path}: unknown table or key {section!r}; allowed: {allowed}")
        for key, value in table.items():
            if key not in known:
                # Without the value: a misspelt api_key holds a secret all the same.
                raise ConfigError(
                    f"{path}: unknown key {section}.{key}; "
                    f"allowed in [{section}]: {', '.join(known)}"
                )
            yield Setting(options[section, key], f"{path}: {section}.{key}", value)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config: {path} is not TOML: {error}") from None
