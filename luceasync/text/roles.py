"""Fits the order of messages to a chat template: some take one system message, and only first.

Agents send system messages in the middle of a conversation, two at its beginning, or two user
messages in a row. An order that the template takes stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from luceasync.errors import RequestError
from luceasync.text.template import Template

Message = Mapping[str, Any]

SYSTEM, USER, ASSISTANT = "system", "user", "assistant"
SEPARATOR = "\n\n"  # between the texts of merged messages


@dataclass(frozen=True, slots=True)
class Roles:
    """Which orders a template takes: two system messages at the beginning, one later on, and two
    user messages in a row.
    """

    two_systems: bool = True
    late_system: bool = True
    two_users: bool = True

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
        )

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in an order that the template takes: late system messages become the user's,
        and neighbours that must not be two are merged.
        """
        fitted = list(messages)
        if not self.late_system:
            fitted = list(_with_late_systems_as_users(fitted))
        if not self.two_systems:
            fitted = list(_merged(SYSTEM, fitted))
        if not self.two_users:
            fitted = list(_merged(USER, fitted))
        return fitted


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
