"""Renders messages with the model's own chat template, and finds where turns end in the result.

Owns the sandbox that templates run in. Knows nothing of HTTP or of what a message may contain.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox

from luceasync.errors import ModelError, RequestError, TemplateRefusal
from luceasync.gguf.model import GgufModel, read_model
from luceasync.gguf.paths import gguf_at
from luceasync.gguf.vocabulary import special_tokens_of, templates_of
from luceasync.text.tokenizer import Tokenizer, read_json, read_text, special_text

JINJA = "chat_template.jinja"
_RESERVED = frozenset({"messages", "tools"})
# What a template raises for messages of an unforeseen shape.
_TEMPLATE_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    RecursionError,  # lists within lists, hundreds deep
)


class Arguments(dict[str, Any]):
    """The arguments of a call by name. As text, or as JSON, they are `text`: the JSON they were
    parsed from, as the model wrote it to the space.

    Some templates list arguments one by one, others insert them into text: `+`, `~` and `{{ }}`
    must not write a Python dict's repr.
    """

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other

    def __radd__(self, other: str) -> str:
        return other + self.text


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with call arguments that are an object, or the JSON of one, as Arguments. A
    message without such calls is the same object. Nothing is changed in place.

    Clients send arguments as text; templates that list them one by one want a mapping.
    """
    return [_with_parsed_calls(message) for message in messages]


def _with_parsed_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    parsed = [_with_parsed_call(call) for call in calls]
    is_same = all(new is old for new, old in zip(parsed, calls, strict=True))
    return message if is_same else {**message, "tool_calls": parsed}


def _with_parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    sent = function.get("arguments") if isinstance(function, Mapping) else None
    arguments = _parsed(sent)
    if function is None or arguments is None:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(sent: Any) -> Arguments | None:
    """None for anything but an object, and for what is parsed already."""
    try:
        if isinstance(sent, Mapping) and not isinstance(sent, Arguments):
            return Arguments(sent, json.dumps(sent, ensure_ascii=False))
        values = json.loads(sent) if isinstance(sent, str) else None
    except (ValueError, TypeError, RecursionError):  # not JSON, or nested too deeply
        return None
    return Arguments(values, sent) if isinstance(values, dict) else None


class Template(Protocol):
    """Renders messages to a prompt's text, as ChatTemplate does."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


class ChatTemplate:
    """A model's compiled chat template. `render` is safe to call from any thread."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`tool_source` is rendered if there are tools. `variables`: bos_token and the like.

        Raises ModelError for a source that does not compile.
        """
        environment = _environment()
        self._template = _compile(environment, source)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = _compile(environment, tool_source)
        self.source = source
        self.special_tokens = dict(variables or {})

    @classmethod
    def load(cls, model_dir: Path, gguf: GgufModel | None = None) -> ChatTemplate:
        """The template of `model_dir`: chat_template.jinja, else chat_template in
        tokenizer_config.json. For a GGUF file, or a directory with one: that of the file, else the
        chat_template.jinja beside it.

        Raises ModelError if there is none, or it does not compile.
        """
        if gguf is None and (file := gguf_at(model_dir)) is not None:
            gguf = read_model(file)
        if gguf is not None:
            sources = templates_of(gguf)
            if "default" not in sources:
                beside = read_text(gguf.path.parent / JINJA)
                sources |= {} if beside is None else {"default": beside}
            advice = f"put a {JINJA} beside it"
            return cls._of(gguf.path, sources, special_tokens_of(gguf), advice)
        config = read_json(model_dir / "tokenizer_config.json")
        variables = {
            name: text
            for name, value in config.items()
            if name.endswith("_token") and (text := special_text(value)) is not None
        }
        advice = (
            f'add a {JINJA}, or a chat_template string (or one named "default") to '
            "tokenizer_config.json"
        )
        return cls._of(model_dir, _sources(model_dir, config), variables, advice)

    @classmethod
    def _of(
        cls, path: Path, sources: Mapping[str, str], variables: Mapping[str, str], advice: str
    ) -> ChatTemplate:
        if "default" not in sources:
            raise ModelError(f"{path} has no chat template; {advice}.")
        try:
            return cls(sources["default"], tool_source=sources.get("tool_use"), variables=variables)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs` are further template variables, from the request. Arguments
        of calls may be objects or their JSON.

        Raises RequestError if the template refuses the messages, or for reserved `kwargs`.
        """
        reserved = sorted(_RESERVED & kwargs.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs must not contain {', '.join(reserved)}.",
                param="chat_template_kwargs",
            )
        template = self._tool_template if tools else self._template
        try:
            return template.render(
                self.special_tokens
                | kwargs
                | {
                    "messages": with_parsed_arguments(messages),
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_FAILURES as error:
            raise TemplateRefusal(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error


@dataclass(frozen=True, slots=True)
class TurnBoundaries:
    """Finds where the turns of a prompt end. `start_id`: the special token that every turn begins
    with; None: unknown.

    A boundary is the index of a turn's first token, just after the previous turn's last one.
    """

    start_id: int | None

    @classmethod
    def of(cls, template: Template, tokenizer: Tokenizer) -> TurnBoundaries:
        """Learn the token from the text that the template appends to open the answer."""
        probe = [{"role": "user", "content": "x"}]
        try:
            closed = template.render(probe, add_generation_prompt=False)
            opened = template.render(probe)
        except RequestError:
            return cls(None)
        ids = tokenizer.encode(opened[len(closed) :]) if opened.startswith(closed) else []
        return cls(ids[0] if ids and tokenizer.is_special(ids[0]) else None)

    def ends(self, prompt_ids: Sequence[int]) -> list[int]:
        """The boundaries of `prompt_ids`, ascending, each in `[1, len)`; none if the token is
        unknown.
        """
        if self.start_id is None:
            return []
        # Searching the bytes of a long prompt is many times faster than comparing tokens.
        packed, start = (array("i", ids).tobytes() for ids in (prompt_ids, [self.start_id]))
        found, at = [], packed.find(start, len(start))
        while at > 0:
            if at % len(start) == 0:  # else it matched across two ids
                found.append(at // len(start))
            at = packed.find(start, at + 1)
        return found


def _sources(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name; files take precedence over tokenizer_config.json."""
    configured = config.get("chat_template")
    if configured is None:
        sources = {}
    elif isinstance(configured, str):
        sources = {"default": configured}
    else:
        sources = _named_sources(model_dir, configured)
    files = {
        "default": model_dir / JINJA,
        "tool_use": model_dir / "additional_chat_templates" / "tool_use.jinja",
    }
    texts = {name: read_text(path) for name, path in files.items()}
    if texts["default"] is not None:
        sources = {}
    return sources | {name: text for name, text in texts.items() if text is not None}


def _named_sources(model_dir: Path, configured: Any) -> dict[str, str]:
    try:
        return {entry["name"]: str(entry["template"]) for entry in configured}
    except (TypeError, KeyError) as error:
        raise ModelError(
            f"{model_dir}: chat_template in tokenizer_config.json must be a string or a list of "
            '{"name", "template"} objects.'
        ) from error


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the chat template does not compile: line {error.lineno}: {error.message}"
        ) from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training; here only its body matters."""

    tags = {"generation"}  # noqa: RUF012 - the base declares it so

    def parse(self, parser: Any) -> list[Any]:
        next(parser.stream)
        body: list[Any] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> jinja2.Environment:
    """The environment that templates on the Hugging Face Hub expect (transformers, Chat
    templates).
    """
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    is_plain = not ensure_ascii and indent is None and separators is None and not sort_keys
    if isinstance(value, Arguments) and is_plain:
        return value.text
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
