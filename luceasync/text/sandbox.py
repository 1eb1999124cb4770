"""The sandbox that chat templates run in, and the program of a process that renders one.

A template comes with a model from any source: it may loop forever, or allocate all memory. The
process limits its own memory and processor time, so it ends even if its parent is gone. Imports
only modules that load fast. Started by luceasync.text.isolation.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

from luceasync.errors import ModelError, TemplateRefusal
from luceasync.text.past_calls import Arguments

MAX_ERROR_CHARS = 2000
MAX_REFUSAL_BYTES = 1 << 16  # for as many characters, and the words around them
PIECE_BYTES = 1 << 16  # received at once
HEADER = struct.Struct("<cQ")  # the kind of a message, and the number of bytes that follow
# Kinds of messages: an order, and the answers to one.
ORDER, TEXT, REFUSED, BROKEN, MEMORY, LENGTH = b"O", b"T", b"R", b"B", b"M", b"L"


class SandboxedTemplate:
    """A compiled template. `render` is thread-safe, and as expensive as the template."""

    def __init__(self, source: str) -> None:
        """Raises ModelError for a source that does not compile."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except (SyntaxError, ValueError, RecursionError) as error:  # of the compiled code
            raise ModelError(f"the chat template does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The rendered text. Raises TemplateRefusal if the template does not accept the variables,
        and MemoryError.
        """
        try:
            return self._template.render(variables)
        except MemoryError:
            raise
        except Exception as error:  # templates may call any method of their values
            raise refusal(str(error)) from error


def refusal(why: str) -> TemplateRefusal:
    """The error for messages that a template does not accept."""
    words = f"The model's chat template refused the messages: {why[:MAX_ERROR_CHARS]}"
    return TemplateRefusal(words, param="messages")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks an answer for training; only its body matters here."""

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


# --- orders -------------------------------------------------------------------------------------


def order_bytes(variables: Mapping[str, Any]) -> bytes:
    """The variables of one rendering, encoded for the process. Raises ValueError and RecursionError
    like json.dumps.
    """
    places = [[*place, text] for place, text in _arguments_in(variables.get("messages") or ())]
    return json.dumps({"variables": variables, "arguments": places}).encode()


def read_order(order: bytes) -> dict[str, Any]:
    """The variables that `order_bytes` encoded."""
    read = json.loads(order)
    variables: dict[str, Any] = read["variables"]
    for *place, last, text in read["arguments"]:
        holder: Any = variables["messages"]
        for key in place:
            holder = holder[key]
        holder[last] = Arguments(holder[last], text)
    return variables


def _arguments_in(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[Any], str]]:
    """The paths of Arguments among the calls of messages, and their texts."""
    for i, message in enumerate(messages):
        if message.get("tool_calls"):
            yield from _arguments_below(message["tool_calls"], [i, "tool_calls"])


def _arguments_below(value: Any, place: list[Any]) -> Iterator[tuple[list[Any], str]]:
    match value:
        case Arguments():
            yield place, value.text
        case dict():
            for key, inner in value.items():
                yield from _arguments_below(inner, [*place, key])
        case list() | tuple():
            for i, inner in enumerate(value):
                yield from _arguments_below(inner, [*place, i])


def message(kind: bytes, payload: bytes) -> bytes:
    """A message in one buffer, so that its reader wakes up once."""
    return HEADER.pack(kind, len(payload)) + payload


def receive(
    channel: socket.socket,
    most_bytes: int | None = None,
    go_on: Callable[[], None] = lambda: None,
) -> tuple[bytes, bytearray]:
    """The kind and the payload of the next message; no other may follow it yet. `go_on` is called
    before each further wait. Raises EOFError at the end of the stream, and for more than
    `most_bytes`.
    """
    found = bytearray(channel.recv(PIECE_BYTES))
    num_bytes = HEADER.size
    while True:
        if len(found) >= num_bytes == HEADER.size:
            kind, num_payload = HEADER.unpack_from(found)
            if most_bytes is not None and num_payload > most_bytes:
                raise EOFError
            num_bytes += num_payload
        if len(found) >= num_bytes:
            return kind, found[HEADER.size :]
        go_on()
        if not (piece := channel.recv(max(PIECE_BYTES, num_bytes - len(found)))):
            raise EOFError
        found += piece


# --- the program --------------------------------------------------------------------------------


class _Program:
    """Renders its parent's orders until the parent closes the channel."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        begun = json.loads(self._order())
        self._limit_s: float = begun["limit_s"]
        self._max_bytes: int = begun["max_text_bytes"]
        resource.setrlimit(resource.RLIMIT_AS, (begun["memory_bytes"],) * 2)
        self._answer(lambda: self._compile(begun["sources"]))

    def run(self) -> None:
        """Answer every order."""
        while True:
            order = self._order()
            self._answer(lambda order=order: self._render(order))

    def _compile(self, sources: Mapping[str, str]) -> str:
        compiled = {name: SandboxedTemplate(source) for name, source in sources.items()}
        self._plain = compiled["default"]
        self._with_tools = compiled.get("tool_use", self._plain)
        return ""

    def _render(self, order: bytes) -> str:
        try:
            variables = read_order(order)
        except RecursionError as error:
            raise refusal("they are nested too deeply") from error
        template = self._with_tools if variables.get("tools") else self._plain
        return template.render(variables)

    def _order(self) -> bytes:
        return bytes(receive(self._channel)[1])

    def _answer(self, work: Any) -> None:
        """Send the text that `work` returns, or the exception that it raised."""
        signal.setitimer(signal.ITIMER_PROF, self._limit_s)  # its signal ends the process
        try:
            kind, payload = TEXT, work().encode("utf-8", "surrogatepass")
            if len(payload) > self._max_bytes:
                kind, payload = LENGTH, b""
        except TemplateRefusal as error:
            kind, payload = REFUSED, str(error).encode("utf-8", "surrogatepass")
        except ModelError as error:
            kind, payload = BROKEN, str(error).encode("utf-8", "surrogatepass")
        except MemoryError:
            kind, payload = MEMORY, b""
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._channel.sendall(message(kind, payload))


def main() -> None:
    """Serve the socket on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    channel = socket.socket(fileno=os.dup(0))
    try:
        _Program(channel).run()
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    main()
