"""Arguments that a client serialised again are restored; changed ones are left alone."""

from __future__ import annotations

from typing import Any

from luceasync.request import ArgumentsPiece, CallPiece, Piece
from luceasync.text.prompt import CallMemory, CallRecorder, PastCall


def message(arguments: Any, call_id: str = "one") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": call_id, "function": function}]}


def arguments_of(messages: list[Any]) -> Any:
    return messages[0]["tool_calls"][0]["function"]["arguments"]


def test_equal_arguments_are_recalled_as_written() -> None:
    memory = CallMemory()
    memory.note("one", '{"a":  1}')
    given = message('{"a":1}')
    assert arguments_of(memory.recall([given])) == '{"a":  1}'
    assert arguments_of([given]) == '{"a":1}'  # the input is unchanged


def test_different_arguments_stay() -> None:
    memory = CallMemory()
    memory.note("one", '{"a":  1}')
    for given in ('{"a":2}', "no JSON", {"a": 1}, None, "[" * 100_000):
        assert arguments_of(memory.recall([message(given)])) == given
    assert arguments_of(memory.recall([message('{"a":1}', "other")])) == '{"a":1}'


def test_calls_of_an_earlier_run_are_recalled_by_what_they_say() -> None:
    memory = CallMemory()
    memory.relearn([PastCall("f", '{"b":  2, "a": 1}'), PastCall("f", "no JSON")])
    assert arguments_of(memory.recall([message('{"a":1,"b":2}', "any")])) == '{"b":  2, "a": 1}'
    memory.relearn([PastCall("g", '{"a": [ ]}')])
    assert (
        arguments_of(memory.recall([message('{"a":[]}', "any")])) == '{"a":[]}'
    )  # of another tool


def test_the_models_own_ids_are_recalled_for_calls_and_results() -> None:
    """Its template shows them, so they are part of what it has written."""
    memory = CallMemory()
    memory.note("one", "{}", "a1B2c3D4e")
    memory.note("two", "{}", "a1B2c3D4e")  # it has given the same to another call
    calls = [message("{}"), message("{}", "two"), message("{}", "three")]
    results = [{"role": "tool", "tool_call_id": i} for i in ("two", "one", "three")]
    recalled = memory.recall([*calls, *results])
    ids = [each["tool_calls"][0]["id"] for each in recalled[:3]]
    assert ids == ["a1B2c3D4e", "two", "three"]
    assert [each["tool_call_id"] for each in recalled[3:]] == ["two", "a1B2c3D4e", "three"]
    # Of a call with the same id but other arguments it is not known whether the model wrote it.
    assert memory.recall([message('{"a":1}')]) == [message('{"a":1}')]


def test_messages_of_any_shape_are_accepted() -> None:
    memory = CallMemory()
    memory.note("one", "{}", "own")
    odd = [
        {"role": "user", "tool_call_id": []},
        {"tool_calls": "x"},
        {"tool_calls": [5, {"id": 1, "function": []}]},
    ]
    assert memory.recall(odd) == odd


def test_the_oldest_are_forgotten() -> None:
    memory = CallMemory(max_chars_held=10)
    memory.note("one", '{"a": 1}')
    memory.note("two", '{"b": 2}')
    assert arguments_of(memory.recall([message('{"a":1}', "one")])) == '{"a":1}'
    assert arguments_of(memory.recall([message('{"b":2}', "two")])) == '{"b": 2}'


class Given:
    def __init__(self, *parts: tuple[Piece, ...]) -> None:
        self._parts = iter(parts)

    def make(self, text: str, *, is_last: bool, is_cut: bool = False) -> tuple[Piece, ...]:
        return next(self._parts)


def test_calls_of_an_answer_are_recorded_once_complete() -> None:
    memory = CallMemory()
    first = (CallPiece(0, "one", "f"), ArgumentsPiece(0, '{"a":'))
    second = (ArgumentsPiece(0, "  1}"), CallPiece(1, "two", "f"), ArgumentsPiece(1, "{ }"))
    maker = CallRecorder(Given(first, second), memory)
    assert maker.make("", is_last=False) == first
    assert arguments_of(memory.recall([message('{"a":1}')])) == '{"a":1}'
    assert maker.make("", is_last=True) == second
    assert arguments_of(memory.recall([message('{"a":1}')])) == '{"a":  1}'
    assert arguments_of(memory.recall([message("{}", "two")])) == "{ }"
