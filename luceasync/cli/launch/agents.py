"""Coding agents, and the variables, flags and files with which each uses a server. An agent's own
configuration is not changed: these settings apply to one run.

Pure: the caller writes the files and starts the agent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MOST_OUTPUT_TOKENS = 8192
PROVIDER = "luceasync"
KEY_VARIABLE = "LUCEASYNC_API_KEY"
NO_KEY = "none"  # for agents that require some key


@dataclass(frozen=True, slots=True)
class Served:
    """A server from the agent's point of view. `key` is "" if it needs none."""

    url: str
    model: str
    max_ctx_tokens: int
    thinks: bool = False
    key: str = field(default="", repr=False)

    @property
    def openai_url(self) -> str:
        """The base of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def output_tokens(self) -> int:
        """The room reserved for an answer, which is subtracted from the context."""
        return min(MOST_OUTPUT_TOKENS, self.max_ctx_tokens // 4)

    @property
    def compact_tokens(self) -> int:
        """The prompt length at which a conversation is to be summarised."""
        return (self.max_ctx_tokens - self.output_tokens) * 9 // 10


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """The settings for one run of an agent. `files` are keyed by their names in a separate folder;
    `unset` are variables that would override the settings.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CodingAgent:
    """An agent. `settings` gets the server and the folder of its files; `first_tokens` is the
    approximate size of its first prompt; `calls_tools`: it requires a model that can call tools.
    """

    title: str
    program: str
    install: str
    first_tokens: int
    settings: Callable[[Served, str], AgentSettings]
    calls_tools: bool = True


def _claude(served: Served, folder: str) -> AgentSettings:
    """Variables alone: Claude Code has no configuration file for a single run."""
    model = served.model
    return AgentSettings(
        {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key or NO_KEY,
            "ANTHROPIC_MODEL": model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
            "CLAUDE_CODE_SUBAGENT_MODEL": model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.max_ctx_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output_tokens),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        unset=("ANTHROPIC_API_KEY",),
    )


def _codex(served: Served, folder: str) -> AgentSettings:
    """With a catalog that describes the model: without one, Codex offers no `apply_patch`, and
    assumes a different context size.
    """
    model = {
        "slug": served.model,
        "display_name": served.model,
        "context_window": served.max_ctx_tokens,
        "apply_patch_tool_type": "freeform",
        "base_instructions": "You are Codex, a coding agent in a terminal. Use your tools to do "
        "what the user asks.",
        "shell_type": "unified_exec",
        "supported_reasoning_levels": [],
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": min(10_000, served.max_ctx_tokens // 6)},
        "experimental_supported_tools": [],
        "visibility": "list",
        "supported_in_api": True,
        "priority": 1,
    }
    provider = {"name": PROVIDER, "base_url": served.openai_url, "wire_api": "responses"}
    if served.key:
        provider["env_key"] = KEY_VARIABLE
    values = {
        "model": served.model,
        "model_provider": PROVIDER,
        "model_catalog_json": f"{folder}/catalog.json",
        "model_auto_compact_token_limit": served.compact_tokens,
        **{f"model_providers.{PROVIDER}.{name}": value for name, value in provider.items()},
    }
    flags = [word for name, value in values.items() for word in ("-c", f"{name}={_toml(value)}")]
    environ = {KEY_VARIABLE: served.key} if served.key else {}
    return AgentSettings(environ, tuple(flags), {"catalog.json": _json({"models": [model]})})


def _opencode(served: Served, folder: str) -> AgentSettings:
    """A configuration in a variable, which overrides those of the user and of the project."""
    name = f"{PROVIDER}/{served.model}"
    limit = {"context": served.max_ctx_tokens, "output": served.output_tokens}
    model = {"name": served.model, "reasoning": served.thinks, "tool_call": True, "limit": limit}
    key = f"{{env:{KEY_VARIABLE}}}" if served.key else NO_KEY
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": name,
        "small_model": name,
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "name": PROVIDER,
                "options": {"baseURL": served.openai_url, "apiKey": key},
                "models": {served.model: model},
            }
        },
    }
    environ = {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}
    return AgentSettings(environ | ({KEY_VARIABLE: served.key} if served.key else {}))


def _aider(served: Served, folder: str) -> AgentSettings:
    """Aider summarises a history that is longer than a sixteenth of the context."""
    name = f"openai/{served.model}"
    limits = {
        "max_input_tokens": served.max_ctx_tokens,
        "max_output_tokens": served.output_tokens,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return AgentSettings(
        {"OPENAI_API_BASE": served.openai_url, "OPENAI_API_KEY": served.key or NO_KEY},
        ("--model", name, "--model-metadata-file", f"{folder}/models.json"),
        {"models.json": _json({name: limits})},
    )


def _qwen_code(served: Served, folder: str) -> AgentSettings:
    """A file of system settings, which overrides those of the user and of the project."""
    generation = {
        "contextWindowSize": served.max_ctx_tokens,
        "samplingParams": {"max_tokens": served.output_tokens},
    }
    settings = {
        "security": {"auth": {"selectedType": "openai"}},
        "model": {"name": served.model, "generationConfig": generation},
        "privacy": {"usageStatisticsEnabled": False},
    }
    return AgentSettings(
        {
            "OPENAI_BASE_URL": served.openai_url,
            "OPENAI_API_KEY": served.key or NO_KEY,
            "OPENAI_MODEL": served.model,
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": f"{folder}/settings.json",
        },
        ("--auth-type", "openai", "--model", served.model),
        {"settings.json": _json(settings)},
    )


def _pi(served: Served, folder: str) -> AgentSettings:
    """An extension that adds a provider for this run."""
    model = {
        "id": served.model,
        "name": served.model,
        "reasoning": served.thinks,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": served.max_ctx_tokens,
        "maxTokens": served.output_tokens,
    }
    provider = {
        "name": PROVIDER,
        "baseUrl": served.openai_url,
        "apiKey": f"${KEY_VARIABLE}" if served.key else NO_KEY,
        "api": "openai-completions",
        "models": [model],
    }
    registers = f"pi.registerProvider({json.dumps(PROVIDER)}, {_json(provider).rstrip()})"
    return AgentSettings(
        {KEY_VARIABLE: served.key} if served.key else {},
        ("-e", f"{folder}/luceasync.js", "--provider", PROVIDER, "--model", served.model),
        {"luceasync.js": f"export default function (pi) {{\n{registers};\n}}\n"},
    )


AGENTS = {
    "claude": CodingAgent(
        "Claude Code", "claude", "npm install -g @anthropic-ai/claude-code", 15_000, _claude
    ),
    "codex": CodingAgent("Codex", "codex", "npm install -g @openai/codex", 7_000, _codex),
    "opencode": CodingAgent("OpenCode", "opencode", "npm install -g opencode-ai", 9_000, _opencode),
    "aider": CodingAgent(
        "aider", "aider", "uv tool install aider-chat", 3_000, _aider, calls_tools=False
    ),
    "qwen-code": CodingAgent(
        "Qwen Code", "qwen", "npm install -g @qwen-code/qwen-code", 23_000, _qwen_code
    ),
    "pi": CodingAgent("pi", "pi", "npm install -g @earendil-works/pi-coding-agent", 2_000, _pi),
}


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _toml(value: object) -> str:
    """A text or a number in TOML, whose basic strings are like JSON's."""
    return json.dumps(value)
