"""Fits a conversation to a chat template, which is tried out once: some take one system message,
and only first.

Agents send system messages in the middle of a conversation, two at its beginning, or two user
messages in a row, and calls that broke off. What the template takes stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.past_calls import as_texts, with_whole_calls
from luceasync.text.template import Template

Message = Mapping[str, Any]

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
SEPARATOR = "\n\n"  # between the texts of merged messages
REASONING = "reasoning_content"
REASONING_FIELDS = (REASONING, "thinking", "reasoning")  # of a message, by what templates read
BROKEN = '{"a": "brok'  # arguments of a call that broke off
PROBE = {"id": "call00000", "type": "function"}


@dataclass(frozen=True, slots=True)
class Roles:
    """Which orders a template takes: two system messages at the beginning, one later on, and two
    user messages in a row. `broken_calls`: it inserts arguments that are no object as they are.
    `reasoning`: the field in which it looks for a message's reasoning.
    """

    two_systems: bool = True
    late_system: bool = True
    two_users: bool = True
    broken_calls: bool = True
    reasoning: str = REASONING

    @classmethod
    def of(cls, template: Template) -> Roles:
        """Probe `template` with each order. One whose text it drops counts as refused."""

        def takes(*roles: str) -> bool:
            messages = [{"role": role, "content": f"text{i}"} for i, role in enumerate(roles)]
            try:
                rendered = template.render(messages)
            except RequestError:
                return False
            return all(message["content"] in rendered for message in messages)

        if not takes(USER):  # nothing can be learned about it
            return cls()
        return cls(
            two_systems=takes(SYSTEM, SYSTEM, USER),
            late_system=takes(USER, SYSTEM, USER) and takes(SYSTEM, USER, ASSISTANT, SYSTEM, USER),
            two_users=takes(USER, USER) and takes(USER, ASSISTANT, USER, USER),
            broken_calls=_shows(template, BROKEN, BROKEN),
            reasoning=_reasoning_field(template),
        )

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in an order that the template takes: late system messages become the user's,
        neighbours that must not be two are merged, and calls that broke off become text.
        """
        fitted = with_whole_calls(messages, keep_broken=self.broken_calls)
        if self.reasoning != REASONING:
            fitted = [_renamed(message, REASONING, self.reasoning) for message in fitted]
        if not self.late_system:
            fitted = list(_with_late_systems_as_users(fitted))
        if not self.two_systems:
            fitted = list(_merged(SYSTEM, fitted))
        if not self.two_users:
            fitted = list(_merged(USER, fitted))
        return fitted

    def fit_as_texts(self, messages: Sequence[Message]) -> list[Message]:
        """A conversation of texts that take turns, for a template that refuses what `fit` made: two
        calls at once, a user's message after a result.
        """
        answers = list(_merged(ASSISTANT, list(as_texts(messages))))
        return self.fit(list(_merged(USER, answers)))


def _shows(template: Template, word: str, arguments: str = "{}", **fields: str) -> bool:
    """Whether `template` writes `word`, which is in a call's arguments or in the fields of its
    message.
    """
    call = {**PROBE, "function": {"name": "f", "arguments": arguments}}
    answer = {"role": ASSISTANT, "content": "", "tool_calls": [call], **fields}
    result = {"role": "tool", "tool_call_id": PROBE["id"], "name": "f", "content": "text1"}
    try:
        return word in template.render([{"role": USER, "content": "text0"}, answer, result])
    except RequestError:
        return False


def _reasoning_field(template: Template) -> str:
    shown = (name for name in REASONING_FIELDS if _shows(template, "thought", **{name: "thought"}))
    return next(shown, REASONING)


def _renamed(message: Message, old: str, new: str) -> Message:
    return {new if name == old else name: value for name, value in message.items()}


def _with_late_systems_as_users(messages: Sequence[Message]) -> Iterator[Message]:
    is_late = False
    for message in messages:
        is_system = message["role"] == SYSTEM
        is_late = is_late or not is_system
        yield {**message, "role": USER} if is_system and is_late else message


def _merged(role: str, messages: Sequence[Message]) -> Iterator[Message]:
    """The messages with each run of `role` merged into its first one, which keeps its other
    fields.
    """
    for is_role, group in groupby(messages, lambda message: message["role"] == role):
        run = list(group)
        if not is_role or len(run) == 1:
            yield from run
        else:
            texts = [str(message.get("content") or "") for message in run]
            yield {**run[0], "content": SEPARATOR.join(texts)}
