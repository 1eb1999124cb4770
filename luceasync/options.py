"""The one table of settings: flag, variable, TOML key, parser and help of each.

Owns names and ranges. Knows nothing of the command line's library, and of which source wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from luceasync import parsers
from luceasync.parsers import Parser

ENV_PREFIX = "LUCEASYNC_"
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"


@dataclass(frozen=True, slots=True)
class Option:
    """One setting and its names: flag `--a-b`, variable `LUCEASYNC_A_B`, TOML `section.a_b`.

    `parse` takes text (flag, variable) or a TOML value and raises ValueError; `allowed` ends the
    sentence "allowed: ..." of the ConfigError that follows. A `secret` value is never shown. A
    `switch` is `--x` or `--no-x`. `needs` names the option without which this one means nothing.
    """

    name: str
    section: str
    field: str
    parse: Parser[object]
    allowed: str
    metavar: str
    help: str
    secret: bool = False
    repeatable: bool = False
    switch: bool = False
    needs: str | None = None

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")


LOG_LEVELS = ("debug", "info", "warning", "error")
DTYPES = ("auto", "bf16", "fp32")
PEER_ACCESS = ("auto", "on", "off")

OPTIONS: tuple[Option, ...] = (
    Option(
        "model-dir",
        "model",
        "model_dir",
        parsers.path,
        "the path of a Hugging Face model directory",
        "DIR",
        "Hugging Face model directory; without it the bundled model is served.",
    ),
    Option(
        "model-name",
        "model",
        "name",
        parsers.text,
        "a name",
        "NAME",
        "Name under which the model is served; default: the directory's name.",
    ),
    Option(
        "dtype",
        "model",
        "dtype",
        parsers.one_of(*DTYPES),
        " | ".join(DTYPES),
        "|".join(DTYPES),
        "Precision of weights and keys/values; auto: bf16 where the device computes it, else fp32.",
    ),
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
    Option(
        "host",
        "server",
        "host",
        parsers.text,
        "an address or host name",
        "ADDRESS",
        "Address to listen on; 0.0.0.0 or :: for every interface.",
    ),
    Option(
        "port",
        "server",
        "port",
        parsers.whole(0, 65535),
        "a whole number from 0 to 65535 (0: any free port)",
        "PORT",
        "Port to listen on.",
    ),
    Option(
        "api-key",
        "server",
        "api_keys",
        parsers.words,
        "keys with commas, none empty",
        "KEY",
        "Key that clients must send as a Bearer token; may be repeated.",
        secret=True,
        repeatable=True,
    ),
    Option(
        "api-key-file",
        "server",
        "api_keys",
        parsers.keys_in_file,
        "a readable file with one key a line ('#' starts a comment)",
        "FILE",
        "File with one API key a line, added to those of --api-key.",
    ),
    Option(
        "max-body",
        "server",
        "max_body_bytes",
        parsers.whole(1),
        "a whole number of bytes, at least 1, such as 16M",
        "BYTES",
        "Largest request body; a larger one gets 413.",
    ),
    Option(
        "keep-alive",
        "server",
        "keep_alive_s",
        parsers.seconds(0.01),
        "seconds from 0.01 to 86400",
        "SECONDS",
        "Silence after which a stream gets a comment, so that no proxy cuts it.",
    ),
    Option(
        "graceful-timeout",
        "server",
        "graceful_timeout_s",
        parsers.seconds(0.0),
        "seconds from 0 to 86400",
        "SECONDS",
        "How long running requests may go on after SIGTERM.",
    ),
    Option(
        "log-level",
        "server",
        "log_level",
        parsers.one_of(*LOG_LEVELS),
        " | ".join(LOG_LEVELS),
        "|".join(LOG_LEVELS),
        "What is written to stderr.",
    ),
)
