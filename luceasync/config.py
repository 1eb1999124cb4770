"""Settings: each is declared once, as a field of a frozen section with its flag, parser and help.

Owns names, defaults and ranges; options.py defines which source takes precedence. Independent of
the devices present and of what a model needs: a valid value that cannot be honoured is refused
where it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from luceasync import parsers
from luceasync.parsers import choice, section, switch, value
from luceasync.server_config import ServerConfig

BUNDLED_MODEL_DIR = Path(__file__).parent / "assets" / "stdlib-15m"
BUNDLED_DRAFT_DIR = Path(__file__).parent / "assets" / "stdlib-15m-dflash"

DtypeName = Literal["auto", "bf16", "fp32"]
# fmt: off
ToolFormat = Literal[
    "auto", "harmony", "qwen-xml", "glm-xml", "qwen-json", "function-json", "mistral-id",
    "mistral", "mistral-json", "deepseek-v3", "deepseek-v3.1", "deepseek-v3.2", "deepseek-v4",
    "kimi-k2", "solar", "minimax-m2", "seed-xml", "minicpm-xml", "granite-json", "phi4-json",
    "nemotron-json", "tool-calls-json", "command-json", "apertus", "gigachat3", "gigachat3.1",
    "internlm2", "function-call-json", "lfm2", "lfm2-json", "minicpm3", "olmo3", "gemma4",
    "functiongemma", "functools-json", "llama-json", "json-list", "pythonic", "none",
]
# fmt: on
ReasoningFormat = Literal["auto", "none"]
PeerAccess = Literal["auto", "on", "off"]
IpcUse = Literal["auto", "always"]
IpcTransport = Literal["auto", "shared", "stream"]
LookupUse = Literal["auto", "on", "off"]
KvFlashPolicy = Literal["qk", "drafter", "lru"]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model to load, in which precision, and how its answers are parsed.

    `names` are the names it is served under, its own first. Its own name is that of the directory
    if `names` is empty or begins with "*".
    """

    model_dir: Path = value(
        BUNDLED_MODEL_DIR,
        "model-dir",
        parsers.path,
        "the path of a Hugging Face model directory or a GGUF file",
        "PATH",
        "Hugging Face model directory or GGUF file; default: the bundled model.",
    )
    names: tuple[str, ...] = value(
        (),
        "model-name",
        parsers.comma_separated,
        "comma-separated names, none empty; * for any name",
        "NAME",
        "Name to serve the model under; may be repeated, * matches any name; default: the "
        "directory's name.",
        repeatable=True,
    )
    dtype: DtypeName = choice(
        "auto",
        "dtype",
        DtypeName,
        "Precision of activations, keys/values and unquantised weights; auto: bf16 where the "
        "device computes it natively, else fp32. Quantised weights stay as they are.",
    )
    trust_special_tokens: bool = switch(
        "trust-special-tokens",
        "Parse '<|im_end|>' and the like in messages as control tokens; default: as text.",
    )
    tool_format: ToolFormat = choice(
        "auto",
        "tool-format",
        ToolFormat,
        "How the model writes tool calls: a format of docs/api.md, or none; auto: the one in which "
        "its chat template writes them.",
        metavar="FORMAT",
    )
    reasoning_format: ReasoningFormat = choice(
        "auto",
        "reasoning-format",
        ReasoningFormat,
        "auto: return what the model writes between <think> and </think>, or the words of its own "
        "chat template, as reasoning, apart from its answer; none: leave it in the text.",
    )


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """The devices of the target's layers: `devices`, or `device`; neither: the best device here.

    `ipc_bins` are programs that run devices in separate processes, each PATH or BACKEND=PATH, or
    BACKEND@MACHINE=tls://HOST:PORT; `ipc_tls` is the certificate for those on other machines; `ipc`
    selects these devices.
    """

    devices: tuple[str, ...] = value(
        (),
        "target-devices",
        parsers.comma_separated,
        "comma-separated device names, such as cuda:0,cuda:1 or cpu",
        "LIST",
        "Devices in layer order, such as cuda:0,cuda:1,cpu; default: the best one here.",
    )
    layer_split: tuple[float, ...] | None = value(
        None,
        "target-layer-split",
        parsers.weights,
        "comma-separated weights above 0, one for each device",
        "LIST",
        "Share of the layers for each device, such as 0.3,0.7; default: by free memory.",
    )
    device: str | None = value(
        None,
        "target-device",
        parsers.text,
        "a device name, such as cuda:0 or cpu",
        "DEVICE",
        "The only device to use; same as --target-devices with one name.",
    )
    expert_bytes: int | Literal["auto"] | None = value(
        None,
        "expert-memory",
        parsers.integer_or_auto(1),
        "auto, or an integer number of bytes, at least 1, such as 4G",
        "BYTES|auto",
        "Memory of GPUs for slots of experts, all of which then wait in host memory; auto: what "
        "nothing else needs; default: all experts are on their devices.",
    )
    peer_access: PeerAccess = choice(
        "auto",
        "peer-access",
        PeerAccess,
        "GPU-to-GPU copies: direct where supported (auto), always direct (on), or through the "
        "host (off).",
    )
    ipc_bins: tuple[str, ...] = value(
        (),
        "target-shard-ipc-bin",
        parsers.comma_separated,
        "PATH or BACKEND=PATH of a luceasync-backend, such as hip=/opt/rocm/bin/luceasync-backend, "
        "or BACKEND@MACHINE=tls://HOST:PORT of one on another machine",
        "[BACKEND=]PATH",
        "Program that runs a backend's devices in its own process, or where one on another machine "
        "listens, such as cuda@box2=tls://box2:7000; may be repeated.",
        repeatable=True,
    )
    ipc_tls: Path | None = value(
        None,
        "target-shard-tls",
        parsers.private_path,
        "a file of `luceasync pair`",
        "FILE",
        "This machine's certificate for other machines' devices, a file of `luceasync pair`.",
    )
    ipc: IpcUse = choice(
        "auto",
        "target-shard-ipc",
        IpcUse,
        "Devices to run in other processes: those this process lacks (auto), or all but the first.",
    )
    ipc_transport: IpcTransport = choice(
        "auto",
        "ipc-transport",
        IpcTransport,
        "How tensors reach other processes: shared memory, a stream, or what is available (auto).",
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of the engine. None: chosen to fit free memory, as `luceasync plan` shows."""

    parallel: int | None = value(
        None,
        "parallel",
        parsers.integer(1, 1024),
        "an integer from 1 to 1024",
        "N",
        "Sequences decoded together (lanes); default: as many as fit, at most 4.",
    )
    max_ctx_tokens: int | None = value(
        None,
        "max-ctx",
        parsers.integer(64),
        "an integer number of tokens, at least 64, such as 32768 or 32K",
        "TOKENS",
        "Context of one lane; default: the model's, as far as memory allows.",
    )
    prefill_chunk_tokens: int | None = value(
        None,
        "prefill-chunk",
        parsers.integer(1),
        "an integer number of tokens, at least 1",
        "TOKENS",
        "Prompt tokens computed between two decode steps; default: by device.",
    )
    max_queue: int = value(
        64,
        "max-queue",
        parsers.integer(0, 2**20),
        "an integer from 0 to 1048576",
        "N",
        "Requests that may wait for a lane; further ones get 429.",
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Which computed prefixes are kept, and where.

    `memory_bytes` None: a quarter of free RAM; 0: no memory tier. `cache_dir` None: no disk tier.
    `budget_bytes` None: half of the disk space that is free or already used by nodes.
    """

    memory_bytes: int | None = value(
        None,
        "prefix-cache-memory",
        parsers.integer(0),
        "an integer number of bytes, such as 8G (0: keep nothing in memory)",
        "BYTES",
        "Memory for computed prefixes; 0 disables this tier; default: a quarter of free RAM.",
    )
    cache_dir: Path | None = value(
        None,
        "kv-cache-dir",
        parsers.path,
        "the path of a directory, which is created if missing",
        "DIR",
        "Directory that keeps computed prefixes across restarts; default: memory only.",
    )
    budget_bytes: int | None = value(
        None,
        "kv-cache-budget",
        parsers.integer(2**20),
        "an integer number of bytes, at least 1M, such as 100G",
        "BYTES",
        "Largest size of --kv-cache-dir, at least 1M; default: half of the usable space there.",
        needs="kv-cache-dir",
    )
    min_tokens: int = value(
        256,
        "kv-cache-min-tokens",
        parsers.integer(0),
        "an integer number of tokens",
        "TOKENS",
        "Do not write shorter prefixes to --kv-cache-dir.",
        needs="kv-cache-dir",
    )
    is_shared: bool = switch(
        "kv-cache-shared",
        "Servers on other machines use --kv-cache-dir too: one of them keeps the budget, and what "
        "others have just written is looked for.",
        needs="kv-cache-dir",
    )
    store_url: str | None = value(
        None,
        "kv-store",
        parsers.text,
        "a URL: s3://BUCKET/PREFIX, gs://..., az://... or file:///PATH",
        "URL",
        "Object store behind --kv-cache-dir, whose prefixes any server may take up; default: none.",
        needs="kv-cache-dir",
    )
    store_key_file: Path | None = value(
        None,
        "kv-store-key-file",
        parsers.private_path,
        "the path of a file with a secret that all servers of the store share",
        "PATH",
        "Believe only what servers with the same secret have put into --kv-store.",
        needs="kv-store",
    )
    interval_tokens: int = value(
        2048,
        "snapshot-interval",
        parsers.integer(64),
        "an integer number of tokens, at least 64",
        "TOKENS",
        "Save a prefix of a long prompt every so many tokens, besides the ends of its turns.",
    )
    trust_cache_salt: bool = switch(
        "trust-cache-salt",
        "Let a request's 'cache_salt' divide the cache further; default: only API keys do.",
    )


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Speculation. `draft_dir` None: see `Config.drafter_dir`. `ipc_bin` None: the drafter runs in
    this process. Other settings that are None are chosen from drafter and model.
    """

    draft_dir: Path | Literal["none", "lookup", "mtp"] | None = value(
        None,
        "draft",
        parsers.drafter,
        "the path of a DFlash drafter, mtp, lookup, or none",
        "PATH|mtp|lookup|none",
        "DFlash drafter for the model; mtp: the head in the model's own weights; lookup: copy from "
        "the text alone; none: no speculation; default: the bundled model's drafter, else mtp "
        "where the weights have it, else lookup; see --draft-lookup.",
    )
    lookup: LookupUse = choice(
        "auto",
        "draft-lookup",
        LookupUse,
        "Copy proposals from the text itself: on, off, or auto: where the model runs on CPUs.",
    )
    device: str | None = value(
        None,
        "draft-device",
        parsers.text,
        "a device name, such as cuda:0 or cpu",
        "DEVICE",
        "Where the drafter runs; default: the device of the target's last layers.",
    )
    ipc_bin: Path | None = value(
        None,
        "draft-ipc-bin",
        parsers.path,
        "the path of a luceasync-backend, such as /opt/rocm/bin/luceasync-backend",
        "PATH",
        "Program that runs the drafter in its own process; default: this process runs it.",
    )
    ctx_max_tokens: int | None = value(
        None,
        "draft-ctx-max",
        parsers.integer(64),
        "an integer number of tokens, at least 64, such as 8K",
        "TOKENS",
        "Context of a lane that the drafter sees; default: as far back as its layers look.",
    )
    swa_window_tokens: int | None = value(
        None,
        "draft-swa-window",
        parsers.integer(1),
        "an integer number of tokens, at least 1",
        "TOKENS",
        "Window of the drafter's sliding-window layers; default: as trained.",
    )
    block: int | None = value(
        None,
        "draft-block",
        parsers.integer(2, 64),
        "an integer from 2 to 64",
        "N",
        "Rows of a proposal, including its known first token; default: as trained.",
    )
    ddtree: bool = switch("ddtree", "Propose a tree of continuations instead of one chain.")
    ddtree_budget: int | None = value(
        None,
        "ddtree-budget",
        parsers.integer(1, 256),
        "an integer from 1 to 256",
        "N",
        "Most nodes of a proposed tree; default: 22.",
        needs="ddtree",
    )


@dataclass(frozen=True, slots=True)
class KvFlashConfig:
    """How much of each lane's context stays on the devices. `pool_tokens` None: all of it. `pins`
    are spans of tokens `[begin, end)` that stay.
    """

    pool_tokens: int | Literal["auto"] | None = value(
        None,
        "kvflash",
        parsers.integer_or_auto(64),
        "auto, or an integer number of tokens, at least 64, such as 8K",
        "TOKENS|auto",
        "Tokens of each lane's context that stay on the devices; host memory holds them all.",
    )
    policy: KvFlashPolicy = choice(
        "qk",
        "kvflash-policy",
        KvFlashPolicy,
        "How they are selected: by the model's own attention, the drafter's, or age alone.",
        needs="kvflash",
    )
    tau_tokens: int = value(
        64,
        "kvflash-tau",
        parsers.integer(1, 2**20),
        "an integer number of tokens from 1 to 1048576",
        "TOKENS",
        "Reselect them after so many tokens of an answer.",
        needs="kvflash",
    )
    pins: tuple[tuple[int, int], ...] = value(
        (),
        "kvflash-pin-spans",
        parsers.spans,
        "comma-separated spans of tokens begin:end, end excluded, such as 0:512",
        "LO:HI,...",
        "Tokens of every lane that always stay on the devices.",
        needs="kvflash",
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings, by section; each part of luceasync gets only its own section."""

    model: ModelConfig = section(ModelConfig, "Model")
    placement: PlacementConfig = section(PlacementConfig, "Devices")
    engine: EngineConfig = section(EngineConfig, "Lanes and queue")
    cache: CacheConfig = section(CacheConfig, "Prefix cache")
    draft: DraftConfig = section(DraftConfig, "Speculation")
    kvflash: KvFlashConfig = section(KvFlashConfig, "Long contexts")
    server: ServerConfig = section(ServerConfig, "Server")

    @property
    def drafter_dir(self) -> Path | None:
        """The directory of the drafter: the given one, otherwise the bundled model's own; None:
        none.
        """
        match self.draft.draft_dir:
            case "none" | "lookup" | "mtp":
                return None
            case None:
                return BUNDLED_DRAFT_DIR if self.model.model_dir == BUNDLED_MODEL_DIR else None
            case given:
                return given
