"""The chat template of a model: where it is found, and where turns end in what it renders.

Independent of HTTP and of what a message may contain.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol

from luceasync.errors import ModelError, RequestError, TemplateOverrun
from luceasync.gguf.model import GgufModel, read_model
from luceasync.gguf.paths import gguf_at
from luceasync.gguf.vocabulary import special_tokens_of, templates_of
from luceasync.text.past_calls import with_parsed_arguments
from luceasync.text.sandbox import SandboxedTemplate
from luceasync.text.tokenizer import Tokenizer, read_json, read_text, special_text

JINJA = "chat_template.jinja"
NO_TEMPLATE = (
    "The model has no chat template, so it takes no chats: use /v1/completions, or add a "
    f"{JINJA} to the model."
)
TRIAL_S = 60.0  # on a busy machine; an idle one takes some ten milliseconds
_RESERVED = frozenset({"messages", "tools"})


class Template(Protocol):
    """Renders messages to a prompt's text, like ChatTemplate."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """A chat template as text, not compiled yet. `path` is the path of its model. `tool_use` is the
    source for chats with tools; None: the same. `special_tokens` are bos_token and similar tokens.
    """

    path: Path
    default: str
    tool_use: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls, model_dir: Path, gguf: GgufModel | None = None) -> TemplateSource | None:
        """The template of `model_dir`: chat_template.jinja, otherwise chat_template in
        tokenizer_config.json. For a GGUF file, or a directory with one: that of the file, otherwise
        the chat_template.jinja beside it. None for a model without a template.

        Raises ModelError if it cannot be read.
        """
        if gguf is None and (file := gguf_at(model_dir)) is not None:
            gguf = read_model(file)
        if gguf is not None:
            sources = templates_of(gguf)
            if "default" not in sources:
                beside = read_text(gguf.path.parent / JINJA)
                sources |= {} if beside is None else {"default": beside}
            return cls._of(gguf.path, sources, special_tokens_of(gguf))
        config = read_json(model_dir / "tokenizer_config.json")
        special_tokens = {
            name: text
            for name, value in config.items()
            if name.endswith("_token") and (text := special_text(value)) is not None
        }
        return cls._of(model_dir, _sources(model_dir, config), special_tokens)

    @classmethod
    def _of(
        cls, path: Path, sources: Mapping[str, str], special_tokens: Mapping[str, str]
    ) -> TemplateSource | None:
        if not sources:
            return None
        if "default" not in sources:
            raise ModelError(f'{path} has no chat template that is named "default".')
        return cls(path, sources["default"], sources.get("tool_use"), special_tokens)

    def variables(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The variables that the template is rendered with. Raises RequestError for reserved
        `kwargs`.
        """
        reserved = sorted(_RESERVED & kwargs.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs must not contain {', '.join(reserved)}.",
                param="chat_template_kwargs",
            )
        return {
            "documents": None,
            **self.special_tokens,
            **kwargs,
            "messages": with_parsed_arguments(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }


class ChatTemplate:
    """A model's chat template, rendered in this process: for a trusted template. `render` is
    thread-safe.
    """

    def __init__(
        self,
        source: str,
        *,
        tool_source: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`tool_source` is rendered if there are tools. `variables` are bos_token and similar
        tokens.

        Raises ModelError for a source that does not compile.
        """
        self.source = source
        self._sources = TemplateSource(Path(), source, tool_source, variables or {})
        self._template = SandboxedTemplate(source)
        self._tool_template = self._template
        if tool_source is not None:
            self._tool_template = SandboxedTemplate(tool_source)

    @classmethod
    def load(cls, model_dir: Path, gguf: GgufModel | None = None) -> ChatTemplate:
        """The template of `model_dir`: see TemplateSource. Raises ModelError if there is none, or
        it does not compile.
        """
        found = TemplateSource.find(model_dir, gguf)
        if found is None:
            file = gguf.path if gguf is not None else gguf_at(model_dir)
            advice = f"add a {JINJA}" if file is None else f"put a {JINJA} beside it"
            raise ModelError(f"{file or model_dir} has no chat template; {advice}.")
        try:
            return cls(found.default, tool_source=found.tool_use, variables=found.special_tokens)
        except ModelError as error:
            raise ModelError(f"{found.path}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `kwargs` are further template variables from the request. Arguments of
        calls may be objects or their JSON.

        Raises RequestError if the template refuses the messages, or for reserved `kwargs`.
        """
        variables = self._sources.variables(messages, tools, add_generation_prompt, kwargs)
        return (self._tool_template if tools else self._template).render(variables)


class OwnTemplate(Template, Protocol):
    """The template of a model with its source; None: the model has none. `is_here`: it is rendered
    in this process.
    """

    is_here: bool

    @property
    def source(self) -> TemplateSource | None: ...

    def close(self) -> None:
        """Stop the renderer. Idempotent; callable from any thread."""
        ...


class ShippedTemplate:
    """Renders like ChatTemplate, in this process: for the template of a model that comes with
    luceasync, whose time grows only with the length of the messages.
    """

    is_here = True

    def __init__(self, source: TemplateSource) -> None:
        """Raises ModelError for a source that does not compile."""
        self.source: TemplateSource | None = source
        self._template = ChatTemplate(
            source.default, tool_source=source.tool_use, variables=source.special_tokens
        )

    def close(self) -> None:
        """No-op: there is no renderer."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Like ChatTemplate.render."""
        return self._template.render(
            messages, tools, add_generation_prompt=add_generation_prompt, **kwargs
        )


class NoTemplate:
    """The template of a model without one: refuses every chat."""

    source = None
    is_here = True

    def close(self) -> None:
        """No-op."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Raise RequestError."""
        raise RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")


class TextParts:
    """Renders like `template`, which shows texts only as lists of parts, as templates of vision
    models do.
    """

    def __init__(self, template: Template) -> None:
        self._template = template

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Like ChatTemplate.render."""
        return self._template.render(
            [in_parts(message) for message in messages],
            tools,
            add_generation_prompt=add_generation_prompt,
            **kwargs,
        )


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with its text, if it has one, as a list of one part."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if text else message


def wants_parts(template: Template) -> bool:
    """Whether `template` shows the user's text only if it is a list of parts."""
    text = "probe of a text"

    def is_shown(tried: Template) -> bool:
        try:
            return text in tried.render([{"role": "user", "content": text}])
        except RequestError:
            return False

    return not is_shown(template) and is_shown(TextParts(template))


class StartTrial:
    """Renders like `template` while a model is being started: a template that exceeds a limit, or
    takes too long for the whole trial, is an error of the model.
    """

    def __init__(self, template: Template, path: Path, limit_s: float = TRIAL_S) -> None:
        self._template = template
        self._path = path
        self._limit_s = limit_s
        self._spent_s = 0.0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Like ChatTemplate.render; raises ModelError at a limit."""
        begin = time.monotonic()
        try:
            return self._template.render(
                messages, tools, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except TemplateOverrun as error:
            self._refuse(f"{error.excess} for a short chat")
        finally:
            self._spent_s += time.monotonic() - begin
            if self._spent_s > self._limit_s:
                self._refuse(f"takes more than {self._limit_s:g} s for a few chats")

    def _refuse(self, excess: str) -> NoReturn:
        raise ModelError(f"{self._path}: the chat template {excess}.") from None


@dataclass(frozen=True, slots=True)
class TurnBoundaries:
    """Finds the ends of turns in a prompt. `start_id` is the special token that every turn begins
    with; None: unknown.

    A boundary is the index of a turn's first token, just after the previous turn's last one.
    """

    start_id: int | None = None

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
            if at % len(start) == 0:  # otherwise it matched across two ids
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
