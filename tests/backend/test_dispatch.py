"""A command is run with the tensors that its receiver expects, or the channel is closed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from luceasync.backend.dispatch import Answers, handlers_of, handles, result
from luceasync.backend.draft import DraftBackend, DraftHandlers, RowHandlers
from luceasync.backend.node_handlers import NodeHandlers
from luceasync.backend.pass_handlers import PassHandlers
from luceasync.backend.stage import StageBackend
from luceasync.errors import ChannelClosed, ModelError
from luceasync.pipeline.remote import answers, wire
from luceasync.speculation.dflash import wire as draft_wire
from tests.backend.parent import Parent, SentPayload


class Event:
    """See Event of a platform."""

    def __init__(self, is_over: bool) -> None:
        self.is_over = is_over

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class Embedding:
    @handles(wire.EmbedTokens)
    def embed(self, command: wire.EmbedTokens, tensors: list[Tensor]) -> Answers:
        return result(*tensors)

    @handles(wire.ResetLane)
    def reset(self, command: wire.ResetLane, tensors: list[Tensor]) -> Answers:
        return ()


class Sizes:
    def check_lane(self, lane: int) -> None:
        pass


def parent() -> Parent:
    return Parent(Sizes(), Embedding())


def test_handlers_are_the_methods_that_are_marked():
    assert handlers_of(Embedding()).keys() == {wire.EmbedTokens, wire.ResetLane}


def commands_of(*classes: type) -> set[type[wire.Command]]:
    methods = [method for each in classes for method in vars(each).values()]
    return {command for method in methods for command in getattr(method, "commands", ())}


def test_every_command_has_a_handler():
    assert commands_of(StageBackend, PassHandlers, NodeHandlers) == set(wire.COMMANDS)
    assert commands_of(DraftBackend, DraftHandlers, RowHandlers) == set(draft_wire.COMMANDS)


def test_a_command_is_answered_as_its_handler_says():
    tokens = torch.zeros(3, dtype=torch.int64)
    assert parent().send(wire.EmbedTokens(3), [tokens]) == [answers.Result()]
    assert parent().send(wire.ResetLane(0)) == []


@pytest.mark.parametrize(
    ("command", "tensors", "words"),
    [
        (wire.EmbedTokens(3), [], "EmbedTokens came without its payload"),
        (wire.EmbedTokens(3), [torch.zeros(4, dtype=torch.int64)], "another size"),
        (wire.ResetLane(0), [torch.zeros(1)], "ResetLane came with a payload"),
        (wire.Synchronize(), [], "Synchronize came before a model was loaded"),
    ],
)
def test_other_tensors_and_commands_are_refused(command, tensors, words: str):
    with pytest.raises(ChannelClosed, match=words):
        parent().send(command, tensors)


def test_a_payload_read_in_place_is_free_before_its_answer_is_sent():
    told = parent()
    event, payload = Event(False), SentPayload(b"12345678")
    told.dispatcher._in_place = payload
    told.dispatcher.free_after(event)
    assert not payload.is_freed
    told.send(wire.EmbedTokens(1), [torch.zeros(1, dtype=torch.int64)])
    assert event.is_over and payload.is_freed


def test_what_cannot_be_loaded_is_said():
    def fail(advance) -> None:
        raise ModelError("no such tensor")

    told = parent()
    told.dispatcher.load(fail)
    told.dispatcher.load(lambda advance: advance(7))
    assert told.channel.answers == [
        answers.CommandFailure("no such tensor"),
        answers.LoadProgress(7),
        answers.Result(),
    ]
