"""The one table of settings: flag, variable, TOML key, parser and help of each.

Owns names and ranges. Knows nothing of the command line's library, and of which source wins.
"""

from __future__ import annotations

from luceasync import parsers
from luceasync.parsers import Option
from luceasync.server_options import SERVER_OPTIONS

# The settings of lanes that keep a part of their context on devices; a part of the table in
# luceasync.options.


POLICIES = ("qk", "drafter", "lru")

KVFLASH_OPTIONS: tuple[Option, ...] = (
    Option(
        "kvflash",
        "kvflash",
        "pool_tokens",
        parsers.whole_or_auto(64),
        "auto, or a whole number of tokens, at least 64, such as 8K",
        "TOKENS|auto",
        "Tokens of each lane's context that stay on the devices; host memory holds all of it.",
    ),
    Option(
        "kvflash-policy",
        "kvflash",
        "policy",
        parsers.one_of(*POLICIES),
        " | ".join(POLICIES),
        "|".join(POLICIES),
        "By what they are chosen: the model's own attention, the drafter's, or age alone.",
        needs="kvflash",
    ),
    Option(
        "kvflash-tau",
        "kvflash",
        "tau_tokens",
        parsers.whole(1, 2**20),
        "a whole number of tokens from 1 to 1048576",
        "TOKENS",
        "Tokens of an answer after which they are chosen anew.",
        needs="kvflash",
    ),
    Option(
        "kvflash-pin-spans",
        "kvflash",
        "pins",
        parsers.spans,
        "spans of tokens begin:end with commas, the end not included, such as 0:512",
        "LO:HI,...",
        "Tokens of every lane that stay on the devices whatever they are worth.",
        needs="kvflash",
    ),
)


# The settings of a model and of what it reads and writes: a part of luceasync.options.


DTYPES = ("auto", "bf16", "fp32")
TOOL_FORMATS = ("auto", "qwen-json", "qwen-xml", "glm-xml", "llama-json", "none")
REASONING_FORMATS = ("auto", "none")

MODEL_OPTIONS: tuple[Option, ...] = (
    Option(
        "model-dir",
        "model",
        "model_dir",
        parsers.path,
        "the path of a Hugging Face model directory or a GGUF file",
        "PATH",
        "Hugging Face model directory or GGUF file; without it the bundled model is served.",
    ),
    Option(
        "model-name",
        "model",
        "names",
        parsers.words,
        "names with commas, none empty; * for every name",
        "NAME",
        "Name under which the model is served; may be repeated, and * is every name; default: the "
        "directory's name.",
        repeatable=True,
    ),
    Option(
        "dtype",
        "model",
        "dtype",
        parsers.one_of(*DTYPES),
        " | ".join(DTYPES),
        "|".join(DTYPES),
        "Precision of activations, keys/values and plain weights; auto: bf16 where the device "
        "computes it, else fp32. Quantised weights stay as they are.",
    ),
    Option(
        "trust-special-tokens",
        "model",
        "trust_special_tokens",
        parsers.switch,
        "on | off",
        "on|off",
        "Read '<|im_end|>' and the like in messages as control tokens; default: as text.",
        switch=True,
    ),
    Option(
        "tool-format",
        "model",
        "tool_format",
        parsers.one_of(*TOOL_FORMATS),
        " | ".join(TOOL_FORMATS),
        "FORMAT",
        "How the model writes calls of tools: qwen-json, qwen-xml, glm-xml, llama-json, or none; "
        "auto: as its chat template shows.",
    ),
    Option(
        "reasoning-format",
        "model",
        "reasoning_format",
        parsers.one_of(*REASONING_FORMATS),
        " | ".join(REASONING_FORMATS),
        "|".join(REASONING_FORMATS),
        "auto: what the model thinks between <think> and </think> is told apart from its answer; "
        "none: it is part of the text.",
    ),
)


PEER_ACCESS = ("auto", "on", "off")
IPC = ("auto", "always")
TRANSPORTS = ("auto", "shared", "stream")

# The sections, as a person reads of them in --help, in this order.
SECTIONS = {
    "model": "Model",
    "placement": "Devices",
    "engine": "Lanes and queue",
    "cache": "Prefix cache",
    "draft": "Speculation",
    "kvflash": "Long contexts",
    "server": "Server",
}

OPTIONS: tuple[Option, ...] = (
    *MODEL_OPTIONS,
    Option(
        "target-device",
        "placement",
        "device",
        parsers.text,
        "a device name, such as cuda:0 or cpu",
        "DEVICE",
        "The one device to use; the same as --target-devices with one name.",
    ),
    Option(
        "target-devices",
        "placement",
        "devices",
        parsers.words,
        "device names with commas, such as cuda:0,cuda:1 or cpu",
        "LIST",
        "Devices in layer order, such as cuda:0,cuda:1,cpu; default: the best one here.",
    ),
    Option(
        "target-layer-split",
        "placement",
        "layer_split",
        parsers.weights,
        "one weight above 0 for each device, with commas",
        "LIST",
        "Share of the layers for each device, such as 0.3,0.7; default: by free memory.",
    ),
    Option(
        "peer-access",
        "placement",
        "peer_access",
        parsers.one_of(*PEER_ACCESS),
        " | ".join(PEER_ACCESS),
        "|".join(PEER_ACCESS),
        "Copies from GPU to GPU: directly where they can (auto), always (on), over the host (off).",
    ),
    Option(
        "target-shard-ipc-bin",
        "placement",
        "ipc_bins",
        parsers.words,
        "PATH or BACKEND=PATH of a luceasync-backend, such as hip=/opt/rocm/bin/luceasync-backend",
        "[BACKEND=]PATH",
        "Program that runs devices of a backend in a process of its own; may be repeated.",
        repeatable=True,
    ),
    Option(
        "target-shard-ipc",
        "placement",
        "ipc",
        parsers.one_of(*IPC),
        " | ".join(IPC),
        "|".join(IPC),
        "Devices with processes of their own: what this one lacks (auto), or all but the first.",
    ),
    Option(
        "ipc-transport",
        "placement",
        "ipc_transport",
        parsers.one_of(*TRANSPORTS),
        " | ".join(TRANSPORTS),
        "|".join(TRANSPORTS),
        "How numbers cross to other processes: shared memory, a stream, or what is there (auto).",
    ),
    Option(
        "parallel",
        "engine",
        "parallel",
        parsers.whole(1, 1024),
        "a whole number from 1 to 1024",
        "N",
        "Sequences decoded together (lanes); default: what fits, at most 4.",
    ),
    Option(
        "max-ctx",
        "engine",
        "max_ctx_tokens",
        parsers.whole(64),
        "a whole number of tokens, at least 64, such as 32768 or 32K",
        "TOKENS",
        "Context of one lane; default: what the model knows and the memory holds.",
    ),
    Option(
        "prefill-chunk",
        "engine",
        "prefill_chunk_tokens",
        parsers.whole(1),
        "a whole number of tokens, at least 1",
        "TOKENS",
        "Prompt tokens computed between two decode steps; default: by device.",
    ),
    Option(
        "max-queue",
        "engine",
        "max_queue",
        parsers.whole(0, 2**20),
        "a whole number from 0 to 1048576",
        "N",
        "Requests that may wait for a lane; further ones get 429.",
    ),
    Option(
        "prefix-cache-memory",
        "cache",
        "memory_bytes",
        parsers.whole(0),
        "a whole number of bytes, such as 8G (0: nothing is kept in memory)",
        "BYTES",
        "Memory for computed prefixes; 0 switches this tier off; default: a quarter of free RAM.",
    ),
    Option(
        "kv-cache-dir",
        "cache",
        "cache_dir",
        parsers.path,
        "the path of a directory, which is made where it is missing",
        "DIR",
        "Directory for computed prefixes, which outlive restarts there; default: memory only.",
    ),
    Option(
        "kv-cache-budget",
        "cache",
        "budget_bytes",
        parsers.whole(2**20),
        "a whole number of bytes, at least 1M, such as 100G",
        "BYTES",
        "Largest size of --kv-cache-dir, at least 1M; default: half of what may be used there.",
        needs="kv-cache-dir",
    ),
    Option(
        "kv-cache-min-tokens",
        "cache",
        "min_tokens",
        parsers.whole(0),
        "a whole number of tokens",
        "TOKENS",
        "Shorter prefixes are not written to --kv-cache-dir.",
        needs="kv-cache-dir",
    ),
    Option(
        "snapshot-interval",
        "cache",
        "interval_tokens",
        parsers.whole(64),
        "a whole number of tokens, at least 64",
        "TOKENS",
        "In a long prompt, a prefix is kept every so many tokens, beside the ends of its turns.",
    ),
    Option(
        "trust-cache-salt",
        "cache",
        "trust_cache_salt",
        parsers.switch,
        "on | off",
        "on|off",
        "Let requests divide the cache further by a 'cache_salt'; default: only API keys do.",
        switch=True,
    ),
    Option(
        "draft",
        "draft",
        "draft_dir",
        parsers.path_or_none,
        "the path of a DFlash drafter's directory, or none",
        "DIR|none",
        "Drafter that speculates for the model; default: the bundled model's own, else none.",
    ),
    Option(
        "draft-device",
        "draft",
        "device",
        parsers.text,
        "a device name, such as cuda:0 or cpu",
        "DEVICE",
        "Where the drafter runs; default: the device of the target's last layers.",
    ),
    Option(
        "draft-ipc-bin",
        "draft",
        "ipc_bin",
        parsers.path,
        "the path of a luceasync-backend, such as /opt/rocm/bin/luceasync-backend",
        "PATH",
        "Program that runs the drafter in a process of its own; default: this process does.",
    ),
    Option(
        "draft-ctx-max",
        "draft",
        "ctx_max_tokens",
        parsers.whole(64),
        "a whole number of tokens, at least 64, such as 8K",
        "TOKENS",
        "Context that the drafter sees of a lane; default: what its layers look back on.",
    ),
    Option(
        "draft-swa-window",
        "draft",
        "swa_window_tokens",
        parsers.whole(1),
        "a whole number of tokens, at least 1",
        "TOKENS",
        "Window of the drafter's sliding layers; default: the one it was trained with.",
    ),
    Option(
        "draft-block",
        "draft",
        "block",
        parsers.whole(2, 64),
        "a whole number from 2 to 64",
        "N",
        "Rows of one proposal, its known first token included; default: the trained block.",
    ),
    Option(
        "ddtree",
        "draft",
        "ddtree",
        parsers.switch,
        "on | off",
        "on|off",
        "Propose a tree of continuations instead of one chain.",
        switch=True,
    ),
    Option(
        "ddtree-budget",
        "draft",
        "ddtree_budget",
        parsers.whole(1, 256),
        "a whole number from 1 to 256",
        "N",
        "Most nodes of a tree that is proposed; default: by measurement.",
        needs="ddtree",
    ),
    *KVFLASH_OPTIONS,
    *SERVER_OPTIONS,
)
