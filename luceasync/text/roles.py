"""Adapts a conversation to a chat template, which is tried out once: some accept a system message
only at the beginning, for example.

Agents send system messages in the middle of a conversation, two at its beginning, two user messages
in a row, and calls that broke off. What the template accepts is left unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.past_calls import (
    CallIds,
    as_texts,
    as_users,
    one_by_one,
    with_ids,
    with_whole_calls,
)
from luceasync.text.template import Template

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]] | None
FitMessages = Callable[[Sequence[Message]], list[Message]]

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
SEPARATOR = "\n\n"  # between the texts of merged messages
REASONING = "reasoning_content"
REASONING_FIELDS = (REASONING, "thinking", "reasoning")  # that templates read
BROKEN = '{"a": "brok'  # arguments of a call that broke off
WORD, RESULT = "word0", "result0"
SECOND = "word1"  # in the arguments of a second call
LONG_ID = "call_00000000000000000000000a"  # in the form that this server generates
PROBE = {"id": "call00000", "type": "function"}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Roles:
    """The orders of messages that a template accepts: two system messages at the beginning, one
    later on, and two user messages in a row. `broken_calls`: it inserts arguments that are not an
    object unchanged. `calls`, `results`: it shows calls, and their results; if it drops either,
    they become text. `bare_calls`: it shows calls only beside the content None. `one_call`: it
    shows a second call only if it is in its own message. `reasoning`: the field of a message's
    reasoning. `ids`: the form of calls' ids.
    """

    two_systems: bool = True
    late_system: bool = True
    two_users: bool = True
    broken_calls: bool = True
    calls: bool = True
    results: bool = True
    bare_calls: bool = False
    one_call: bool = False
    reasoning: str = REASONING
    ids: CallIds = "any"

    @classmethod
    def of(cls, template: Template, tools: Tools = None) -> Roles:
        """Probe `template` with each order. An order whose text it drops counts as refused. `tools`
        are offered to it, since some templates show no calls without tools.
        """
        probe = _Probe(template, tools)

        def takes(*roles: str) -> bool:
            messages = [{"role": role, "content": f"text{i}"} for i, role in enumerate(roles)]
            try:
                rendered = template.render(messages, tools)
            except RequestError:
                return False
            return all(message["content"] in rendered for message in messages)

        if not takes(USER):  # nothing can be learned about the template
            return cls()
        call = f'{{"a": "{WORD}"}}'
        drops_calls = probe.drops(WORD, call)
        bare_calls = drops_calls and probe.shows(WORD, call, content=None)
        content = None if bare_calls else ""
        return cls(
            two_systems=takes(SYSTEM, SYSTEM, USER),
            late_system=takes(USER, SYSTEM, USER) and takes(SYSTEM, USER, ASSISTANT, SYSTEM, USER),
            two_users=takes(USER, USER) and takes(USER, ASSISTANT, USER, USER),
            broken_calls=probe.shows(BROKEN, BROKEN),
            calls=not drops_calls or bare_calls,
            bare_calls=bare_calls,
            one_call=not probe.shows_two(content) and probe.shows_two(content, one_by_one),
            results=not probe.drops(RESULT),
            reasoning=probe.reasoning_field(),
            ids=probe.call_ids(),
        )

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in an order that the template accepts: late system messages become user
        messages, neighbours with the same role are merged where necessary, and calls that broke off
        become text.
        """
        fitted = with_whole_calls(messages, keep_broken=self.broken_calls)
        if self.one_call:
            fitted = [*one_by_one(fitted)]
        if self.ids != "any":
            fitted = with_ids(fitted, self.ids)
        if not self.results:
            fitted = [as_users(message) for message in fitted]
        is_mixed = any(m.get("tool_calls") and m.get("content") for m in fitted)
        if not self.calls or (self.bare_calls and is_mixed):
            fitted = [*as_texts(fitted, keep_results=self.results)]
        elif self.bare_calls:
            fitted = [{**m, "content": None} if m.get("tool_calls") else m for m in fitted]
        if self.reasoning != REASONING:
            fitted = [_renamed(message, REASONING, self.reasoning) for message in fitted]
        if not self.late_system:
            fitted = list(_with_late_systems_as_users(fitted))
        if not self.two_systems:
            fitted = list(_merged(SYSTEM, fitted))
        if not self.two_users:
            fitted = list(_merged(USER, fitted))
        return fitted

    @property
    def fits(self) -> tuple[FitMessages, ...]:
        """`fit`, and the alternatives to try in turn if the template refuses its result."""
        return self.fit, self.fit_thinking_aloud, self.fit_with_pauses, self.fit_as_texts

    def fit_thinking_aloud(self, messages: Sequence[Message]) -> list[Message]:
        """Like `fit`, with the text beside a call at the end of its reasoning: some templates
        accept only one of the two.
        """
        return self.fit([_thinking_aloud(message) for message in messages])

    def fit_with_pauses(self, messages: Sequence[Message]) -> list[Message]:
        """Like `fit`, with an empty answer before each user message that follows a call or its
        result: some templates do not count these as turns.
        """
        return self.fit(list(_with_pauses(messages)))

    def fit_as_texts(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation of texts with alternating roles, beginning with the user, for a template
        that refuses the result of `fit`: for example two calls at once, or a user message after a
        result.
        """
        answers = list(_merged(ASSISTANT, list(as_texts(messages))))
        turns = list(_merged(USER, answers))
        begin = next((i for i, turn in enumerate(turns) if turn["role"] != SYSTEM), 0)
        if turns and turns[begin]["role"] == ASSISTANT:
            turns.insert(begin, {"role": USER, "content": ""})
        return self.fit(turns)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Tries a template with a call and its result."""

    template: Template
    tools: Tools

    def shows(self, word: str, arguments: str = "{}", **fields: str | None) -> bool:
        """Whether the template writes `word`, which occurs in a call's arguments or in the fields
        of its message.
        """
        return word in self._called(arguments, fields=fields)

    def drops(self, word: str, arguments: str = "{}") -> bool:
        """Whether the template accepts a call and its result, but does not write `word`."""
        rendered = self._called(arguments)
        return bool(rendered) and word not in rendered

    def shows_two(
        self, content: str | None, fit: Callable[[Sequence[Message]], Iterable[Message]] = list
    ) -> bool:
        """Whether the template writes both calls of a message that `fit` has changed."""
        calls, results = [], []
        for call_id, word in ((PROBE["id"], WORD), ("call00001", SECOND)):
            function = {"name": "f", "arguments": {"a": word}}
            calls.append({**PROBE, "id": call_id, "function": function})
            results.append({"role": "tool", "tool_call_id": call_id, "name": "f", "content": "x"})
        answer = {"role": ASSISTANT, "content": content, "tool_calls": calls}
        said: list[Message] = [{"role": USER, "content": "text0"}, answer, *results]
        rendered = self._rendered([*fit(with_whole_calls(said))])
        return WORD in rendered and SECOND in rendered

    def call_ids(self) -> CallIds:
        if not self._called("{}"):
            return "any"
        if not self._called("{}", call_id=LONG_ID):
            return "short"
        shown = self._called("{}", function="function0")
        return "named" if PROBE["id"] in shown and "function0" not in shown else "any"

    def reasoning_field(self) -> str:
        shown = (name for name in REASONING_FIELDS if self.shows("thought", **{name: "thought"}))
        return next(shown, REASONING)

    def _called(
        self,
        arguments: str,
        function: str = "f",
        call_id: str = PROBE["id"],
        fields: Mapping[str, str | None] | None = None,
    ) -> str:
        """A call and its result, rendered; "" if the template refuses them."""
        call = {**PROBE, "id": call_id, "function": {"name": function, "arguments": arguments}}
        answer = {"role": ASSISTANT, "content": "", "tool_calls": [call], **(fields or {})}
        result = {"role": "tool", "tool_call_id": call_id, "name": function, "content": RESULT}
        return self._rendered([{"role": USER, "content": "text0"}, answer, result])

    def _rendered(self, messages: Sequence[Message]) -> str:
        """The prompt; "" if the template refuses it."""
        try:
            return self.template.render(messages, self.tools)
        except RequestError:
            return ""


def _thinking_aloud(message: Message) -> Message:
    texts = [message.get(REASONING), message.get("content")]
    if not message.get("tool_calls") or not all(texts):
        return message
    return {**message, REASONING: SEPARATOR.join(map(str, texts)), "content": ""}


def _with_pauses(messages: Sequence[Message]) -> Iterator[Message]:
    is_calling = False
    for message in messages:
        if is_calling and message["role"] == USER:
            yield {"role": ASSISTANT, "content": ""}
        is_calling = message["role"] == "tool" or bool(message.get("tool_calls"))
        yield message


def _renamed(message: Message, old: str, new: str) -> Message:
    return {new if name == old else name: value for name, value in message.items()}


def _with_late_systems_as_users(messages: Sequence[Message]) -> Iterator[Message]:
    is_late = False
    for message in messages:
        is_system = message["role"] == SYSTEM
        is_late = is_late or not is_system
        yield {**message, "role": USER} if is_system and is_late else message


def _merged(role: str, messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with each run of `role` merged into its first message, which keeps its other
    fields.
    """
    for is_role, group in groupby(messages, lambda message: message["role"] == role):
        run = list(group)
        if not is_role or len(run) == 1:
            yield from run
        else:
            texts = [str(message.get("content") or "") for message in run]
            yield {**run[0], "content": SEPARATOR.join(texts)}
