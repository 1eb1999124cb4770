"""Messages to a prompt's text by the model's own chat template, and where the turns in it end.

Owns the sandbox that templates run in. Knows nothing of HTTP or of what a message may hold.
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

from luceasync.errors import ModelError, RequestError
from luceasync.gguf.model import read_model
from luceasync.gguf.place import gguf_at
from luceasync.gguf.vocabulary import special_tokens_of, templates_of
from luceasync.text import tokenizer as model_files
from luceasync.text.call_memory import Arguments, with_parsed_arguments
from luceasync.text.tokenizer import Tokenizer

JINJA = "chat_template.jinja"
_RESERVED = frozenset({"messages", "tools"})
# What a template does with messages of a shape that it did not foresee.
_TEMPLATE_FAILURES = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError),
    RecursionError,  # lists within lists, hundreds deep
)


class Template(Protocol):
    """Makes a prompt's text of messages: see ChatTemplate."""

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
    """A model's compiled chat template; `render` may be called from any thread."""

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`tool_source` is rendered when tools are given. `variables`: bos_token and the like.

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
    def load(cls, model_dir: Path) -> ChatTemplate:
        """The template of `model_dir`: chat_template.jinja, else chat_template in
        tokenizer_config.json; or that of the GGUF file that it is or holds, else the
        chat_template.jinja beside that file.

        Raises ModelError when there is none, or one that does not compile.
        """
        if (file := gguf_at(model_dir)) is not None:
            model = read_model(file)
            sources = templates_of(model)
            if "default" not in sources:
                beside = model_files.read_text(file.parent / JINJA)
                sources |= {} if beside is None else {"default": beside}
            return cls._of(file, sources, special_tokens_of(model), f"put a {JINJA} beside it")
        config = model_files.read_json(model_dir / "tokenizer_config.json")
        variables = {
            name: text
            for name, value in config.items()
            if name.endswith("_token") and (text := model_files.special_text(value)) is not None
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
        """The prompt's text. `kwargs` are further variables of the template, from the request.
        Arguments of calls may be objects or their JSON.

        Raises RequestError when the template refuses the messages, or `kwargs` name what is not
        theirs.
        """
        taken = sorted(_RESERVED & kwargs.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs must not hold {', '.join(taken)}.",
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
            raise RequestError(
                f"The model's chat template refused the messages: {error}", param="messages"
            ) from error


@dataclass(frozen=True, slots=True)
class Turns:
    """Where the turns of a prompt end. `start_id` is the special token that every turn begins with,
    or None.

    A boundary is the index just after a turn's last token: where the next turn's first token
    stands.
    """

    start_id: int | None

    @classmethod
    def of(cls, template: Template, tokenizer: Tokenizer) -> Turns:
        """Learn the token from what the template appends to open the answer; None where that has
        none.
        """
        probe = [{"role": "user", "content": "x"}]
        try:
            closed = template.render(probe, add_generation_prompt=False)
            opened = template.render(probe)
        except RequestError:
            return cls(None)
        ids = tokenizer.encode(opened[len(closed) :]) if opened.startswith(closed) else []
        return cls(ids[0] if ids and tokenizer.is_special(ids[0]) else None)

    def ends(self, prompt_ids: Sequence[int]) -> list[int]:
        """The boundaries of `prompt_ids`, rising, each in `[1, len)`; none when the token is not
        known.
        """
        if self.start_id is None:
            return []
        # As bytes a long prompt is searched many times as fast as token by token.
        packed, sought = (array("i", ids).tobytes() for ids in (prompt_ids, [self.start_id]))
        found, at = [], packed.find(sought, len(sought))
        while at > 0:
            if at % len(sought) == 0:
                found.append(at // len(sought))
            at = packed.find(sought, at + 1)
        return found


def _sources(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name: files come before what tokenizer_config.json holds."""
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
    texts = {name: model_files.read_text(path) for name, path in files.items()}
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
    """`{% generation %}` marks an answer for training; here it is just its body."""

    tags = {"generation"}  # noqa: RUF012 - the base declares it so

    def parse(self, parser: Any) -> list[Any]:
        next(parser.stream)
        body: list[Any] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _environment() -> jinja2.Environment:
    """What templates on the Hugging Face Hub are written for (transformers, Chat templates)."""
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
    # Jinja's own filter escapes HTML, which a model has never seen.
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
