"""Which answers a later prompt can begin with as they were generated."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from luceasync.config import BUNDLED_MODEL_DIR
from luceasync.errors import TemplateOverrun, Unavailable
from luceasync.text.shared_prefix import ReplayCheck, ReplayResults
from luceasync.text.template import ChatTemplate

TEMPLATES = Path(__file__).parents[2] / "tests/acceptance/turns"
QWEN3_5 = ChatTemplate((TEMPLATES / "qwen3.5.jinja").read_text())  # the template opens reasoning
QWEN3 = ChatTemplate((TEMPLATES / "qwen3.jinja").read_text())  # leaves it to the model
WHOLE = ChatTemplate.load(BUNDLED_MODEL_DIR)  # drops nothing
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def returns(byte_level):
    """The check for answers to ASKED, with "<think>" as one token."""

    def of(template: ChatTemplate, messages=ASKED, tools=None, **kwargs) -> ReplayCheck:
        text = template.render(messages, tools, **kwargs)
        return ReplayCheck.of(template, byte_level, text, messages, tools, kwargs)

    return of


@pytest.fixture
def thought(byte_level) -> list[int]:
    """The beginning of an answer whose reasoning the model opens."""
    return [byte_level.token_id("<think>"), *byte_level.encode("the cat")]


@pytest.fixture
def said(byte_level) -> list[int]:
    return byte_level.encode("the cat")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_that_drops_nothing_replays_answers(returns, said, thought, tools):
    found = returns(WHOLE, tools=tools)
    assert found(said) and found(thought)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_a_template_that_drops_reasoning_before_a_users_turn_does_not(
    returns, said, enable_thinking
):
    assert not returns(QWEN3_5, enable_thinking=enable_thinking)(said)


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_it_does_replay_before_a_tool_result(returns, said, enable_thinking):
    assert returns(QWEN3_5, tools=TOOLS, enable_thinking=enable_thinking)(said)


def test_if_the_model_opens_its_reasoning_the_answer_decides(returns, said, thought):
    found = returns(QWEN3)
    assert found(said)
    assert not found(thought)


def test_reasoning_opened_by_the_model_stays_before_a_tool_result(returns, said, thought):
    found = returns(QWEN3, tools=TOOLS)
    assert found(said) and found(thought)


def test_with_reasoning_disabled_no_answer_is_replayed(returns, said):
    assert not returns(QWEN3, enable_thinking=False)(said)


def test_each_kind_is_tried_once():
    tried = []
    found = ReplayCheck(lambda: bool(tried.append("others")), lambda: bool(tried.append("it")), 9)
    assert tried == []
    assert not found([5]) and not found([]) and tried == ["others"]
    assert not found([9, 5]) and not found([9]) and tried == ["others", "it"]


def test_what_is_begun_is_tried_once_and_without_waiting():
    is_free, tried = threading.Event(), []

    def trial() -> bool:
        tried.append(is_free.wait(60))
        return False

    found = ReplayCheck(trial)
    found.begin([5]), found.begin([5, 6])
    is_free.set()
    assert not found([5, 6, 7]) and tried == [True]


def test_what_chats_of_the_form_have_shown_is_not_tried_again():
    results = ReplayResults()
    assert ReplayCheck(results=results, form="a chat")([5])
    again = ReplayCheck(lambda: pytest.fail("tried"), results=results, form="a chat")
    again.begin([5])
    assert again([5])


def test_without_a_template_nothing_is_tried(monkeypatch):
    monkeypatch.setattr(threading, "Thread", lambda **kwargs: pytest.fail("a thread"))
    found = ReplayCheck.always()
    found.begin([5])
    assert found([5])


def test_an_empty_answer_is_not_reasoning(returns):
    assert returns(QWEN3)([])


def test_without_an_opening_token_only_plain_answers_are_tried(fallback, said):
    text = QWEN3.render(ASKED)
    found = ReplayCheck.of(QWEN3, fallback, text, ASKED)
    assert found(said) and found([0])


def test_an_answer_trimmed_to_nothing_is_not_replayed(returns, said):
    source = "{% for m in messages if m.role != 'assistant' %}{{ m.content }}{% endfor %}"
    assert not returns(ChatTemplate(source))(said)


def test_if_every_trial_is_refused_answers_may_be_replayed(returns, said, thought):
    source = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}x"
    found = returns(ChatTemplate(source))
    assert found(said) and found(thought)


@pytest.mark.parametrize("error", [TemplateOverrun("takes more than 3 s"), Unavailable("busy")])
def test_a_continuation_that_cannot_be_rendered_is_not_tried_again(returns, said, error):
    class Slow:
        num_rendered = 0

        def render(self, messages, tools=None, /, **kwargs) -> str:
            if messages == ASKED:
                return "asked"
            self.num_rendered += 1
            raise error

    slow = Slow()
    assert not returns(slow, tools=TOOLS)(said)
    assert slow.num_rendered == 1


def test_an_answer_does_not_wait_for_the_renderings_of_other_chats():
    """The engine thread asks: all lanes would stand still."""
    is_free = threading.Event()
    found = ReplayCheck(lambda: is_free.wait(60), limit_s=0.05)
    assert not found([5])
    is_free.set()


def test_a_result_that_is_late_counts_from_then_on():
    is_free = threading.Event()
    found = ReplayCheck(lambda: is_free.wait(60), limit_s=0.05)
    assert not found([5])
    is_free.set()
    deadline = time.monotonic() + 20
    while not found([5]):
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Counted:
    """QWEN3, and how often it rendered."""

    def __init__(self) -> None:
        self.num_rendered = 0

    def render(self, messages, tools=None, /, **kwargs) -> str:
        self.num_rendered += 1
        return QWEN3.render(messages, tools, **kwargs)


def test_chats_of_one_form_are_tried_once(byte_level, said, thought):
    counted, results = Counted(), ReplayResults()
    text = QWEN3.render(ASKED)
    first = ReplayCheck.of(counted, byte_level, text, ASKED, results=results)
    assert first(said) and not first(thought)
    num_rendered = counted.num_rendered
    other = [ASKED[0], {"role": "user", "content": "Something else"}]
    found = ReplayCheck.of(counted, byte_level, QWEN3.render(other), other, results=results)
    assert found(said) and not found(thought)
    assert counted.num_rendered == num_rendered


@pytest.mark.parametrize(
    ("messages", "tools", "kwargs"),
    [
        (ASKED[1:], None, {}),
        (ASKED, TOOLS, {}),
        (ASKED, None, {"enable_thinking": False}),
        (
            [*ASKED[:1], {"role": "user", "content": "<tool_response>\n1\n</tool_response>"}],
            None,
            {},
        ),
        ([*ASKED, {"role": "assistant", "content": "<think>\na\n</think>\nb"}, ASKED[1]], None, {}),
    ],
)
def test_chats_of_another_form_are_tried(byte_level, said, messages, tools, kwargs):
    counted, results = Counted(), ReplayResults()
    ReplayCheck.of(counted, byte_level, QWEN3.render(ASKED), ASKED, results=results)(said)
    num_rendered = counted.num_rendered
    text = QWEN3.render(messages, tools, **kwargs)
    ReplayCheck.of(counted, byte_level, text, messages, tools, kwargs, results)(said)
    assert counted.num_rendered > num_rendered


def test_what_could_not_be_rendered_is_tried_for_the_next_chat(byte_level, said):
    class Busy:
        def render(self, messages, tools=None, /, **kwargs) -> str:
            raise Unavailable("busy")

    results, text = ReplayResults(), WHOLE.render(ASKED)
    assert not ReplayCheck.of(Busy(), byte_level, text, ASKED, results=results)(said)
    assert ReplayCheck.of(WHOLE, byte_level, text, ASKED, results=results)(said)
