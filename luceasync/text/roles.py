"""Messages in the order that a chat template takes: some take one system message, first of all.

Agents send system messages in the middle of a conversation, two at its beginning, or two of a user
in a row. Owns how they are fitted. What a template takes as it is stays as it is.
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
BETWEEN = "\n\n"  # the texts of messages that become one


@dataclass(frozen=True, slots=True)
class Roles:
    """What a template takes: two system messages at the beginning, one later on, and two messages
    of a user in a row.
    """

    two_systems: bool = True
    late_system: bool = True
    two_users: bool = True

    @classmethod
    def of(cls, template: Template) -> Roles:
        """Tried with messages of each kind. What a template leaves out it does not take."""

        def takes(*roles: str) -> bool:
            said = [{"role": role, "content": f"text{i}"} for i, role in enumerate(roles)]
            try:
                rendered = template.render(said)
            except RequestError:
                return False
            return all(message["content"] in rendered for message in said)

        if not takes(USER):  # nothing is known of it
            return cls()
        return cls(
            two_systems=takes(SYSTEM, SYSTEM, USER),
            late_system=takes(USER, SYSTEM, USER) and takes(SYSTEM, USER, ASSISTANT, SYSTEM, USER),
            two_users=takes(USER, USER) and takes(USER, ASSISTANT, USER, USER),
        )

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template takes them: a system message that comes late is a user's,
        neighbours that may not be two are one.
        """
        fitted = list(messages)
        if not self.late_system:
            fitted = list(_with_late_systems_as_users(fitted))
        if not self.two_systems:
            fitted = list(_with_one(SYSTEM, fitted))
        if not self.two_users:
            fitted = list(_with_one(USER, fitted))
        return fitted


def _with_late_systems_as_users(messages: Sequence[Message]) -> Iterator[Message]:
    is_late = False
    for message in messages:
        is_system = message["role"] == SYSTEM
        is_late = is_late or not is_system
        yield {**message, "role": USER} if is_system and is_late else message


def _with_one(role: str, messages: Sequence[Message]) -> Iterator[Message]:
    """Neighbours of `role` as one message each, which has what else the first of them has."""
    for is_role, run in groupby(messages, lambda message: message["role"] == role):
        said = list(run)
        if not is_role or len(said) == 1:
            yield from said
        else:
            texts = [str(message.get("content") or "") for message in said]
            yield {**said[0], "content": BETWEEN.join(texts)}
