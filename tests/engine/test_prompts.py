"""A prompt of whatever kind becomes token ids, or is refused by the name of its kind."""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luceasync.engine.prompts import Language, Prompts, has_unknown_answers
from luceasync.errors import ContextLengthError, RequestError
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    ChatPrompt,
    Constraint,
    ModelCard,
    Request,
    TextPiece,
    TextPrompt,
    TokenPrompt,
)
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.history import History
from luceasync.text.roles import TOOL, Roles
from luceasync.text.template import ChatTemplate, TurnBoundaries
from luceasync.text.tokenizer import Tokenizer

MAX_CTX_TOKENS = 256
CHAT = ChatPrompt([{"role": "user", "content": "to be or not"}])


@pytest.fixture
def language(tiny_dir: Path) -> Language:
    tokenizer = Tokenizer.load(tiny_dir)
    card = ModelCard("tiny", 0, MAX_CTX_TOKENS, 1, "qwen3")
    template = ChatTemplate.load(tiny_dir)
    return Language(
        card,
        tokenizer,
        template,
        vocab_size=300,
        num_lanes=2,
        roles=Roles.of(template),
        tool_roles=Roles.of(template, [TOOL]),
        turns=TurnBoundaries.of(template, tokenizer),
    )


@pytest.fixture
def prompts(language: Language) -> Prompts:
    return Prompts(language, Tenants(lambda: History(language.tokenizer)))


def render(prompts: Prompts, prompt: Any, **fields: Any):
    return prompts.render(Request(prompt, **fields))


def test_text_and_ids_are_the_prompt_of_the_messages_that_render_to_them(prompts, language):
    """Special tokens in the text are the tokens that they name; nothing is put before or after."""
    text = language.template.render(CHAT.messages)
    ids = tuple(language.tokenizer.encode(text))
    rendered = [render(prompts, p) for p in (CHAT, TextPrompt(text), TokenPrompt(ids))]
    assert {tuple(r.ids) for r in rendered} == {ids}
    assert len({r.boundaries for r in rendered}) == 1
    assert [r.text for r in rendered] == [text, text, None]


def test_raw_text_gets_no_template(prompts, language):
    ids = language.tokenizer.encode("to be or not")
    assert render(prompts, TextPrompt("to be or not")).ids.tolist() == ids


def test_raw_text_begins_with_what_the_tokenizer_puts_before_texts(language, tiny_dir: Path):
    """Once, also where the text has it; chats have it from their template, ids as they come."""
    definition = json.loads((tiny_dir / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    known = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, sequence],
        "pair": [first, sequence, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": known},
    }
    led = Tokenizer(json.dumps(definition))
    prompts = Prompts(replace(language, tokenizer=led), Tenants(lambda: History(led)))
    expected = [0, *led.encode("to be or not")]
    for text in ("to be or not", "<|endoftext|>to be or not"):
        assert render(prompts, TextPrompt(text)).ids.tolist() == expected
    assert render(prompts, CHAT).ids.tolist() == led.encode(language.template.render(CHAT.messages))
    assert render(prompts, TokenPrompt((5, 6))).ids.tolist() == [5, 6]


def test_ids_outside_the_vocabulary_are_refused_with_their_place(prompts):
    for wrong in (-1, 300):
        with pytest.raises(RequestError, match=rf"prompt\[1\] is token {wrong}; .* 0 to 299") as e:
            render(prompts, TokenPrompt((0, wrong)))
        assert e.value.param == "prompt"


@pytest.mark.parametrize("prompt", [TextPrompt(""), TokenPrompt(())])
def test_an_empty_prompt_is_refused_by_its_name(prompts, prompt):
    with pytest.raises(RequestError, match="prompt: the rendered prompt is empty"):
        render(prompts, prompt)


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        (TokenPrompt((1,) * MAX_CTX_TOKENS), "prompt"),
        (ChatPrompt([{"role": "user", "content": "x" * MAX_CTX_TOKENS}]), "messages"),
    ],
)
def test_a_prompt_that_leaves_no_room_to_answer_is_refused_by_its_name(prompts, prompt, name):
    with pytest.raises(ContextLengthError, match=rf"is {MAX_CTX_TOKENS} tokens.*your {name} "):
        render(prompts, prompt)
    render(prompts, TokenPrompt((1,) * (MAX_CTX_TOKENS - 1)))


def test_messages_that_are_only_kept_end_where_the_next_turn_begins(prompts, language):
    system = ChatPrompt([{"role": "system", "content": "be brief"}])
    kept = render(prompts, system, keep_prefix=True, max_tokens=0)
    continued = language.template.render([*system.messages, *CHAT.messages])
    ids = language.tokenizer.encode(continued)
    assert kept.ids.tolist() == ids[: len(kept.ids)]
    assert kept.boundaries[-1] == len(kept.ids)
    assert kept.text is None


def test_what_a_tenant_was_answered_comes_back_with_the_ids_that_it_had(prompts, language):
    encode = language.tokenizer.encode
    said = array("i", [encode(letter)[0] for letter in "to be"])
    first = render(prompts, TextPrompt("or not"), tenant="a")
    first.tenant.history.remember(first.text, first.ids, said)
    again = TextPrompt("or not" + "to be")
    assert render(prompts, again, tenant="a").ids == first.ids + said
    others = render(prompts, again, tenant="b").ids.tolist()
    assert others == encode(again.text) != [*first.ids, *said]


def test_a_history_that_the_template_refuses_is_rendered_as_texts(language):
    source = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    template = ChatTemplate(source)
    language = replace(language, template=template, roles=Roles.of(template))
    prompts = Prompts(language, Tenants(lambda: History(language.tokenizer)))
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "do"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    text = render(prompts, ChatPrompt(said)).text
    assert text == '<user>do<assistant>{"name": "f", "arguments": {}}<user>done'


def test_calls_that_a_template_shows_beside_tools_alone_are_text_without(language):
    source = (
        "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
        "{% for c in m.tool_calls or [] if tools %}({{ c.function.arguments | tojson }})"
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source)
    roles, tool_roles = Roles.of(template), Roles.of(template, [TOOL])
    language = replace(language, template=template, roles=roles, tool_roles=tool_roles)
    prompts = Prompts(language, Tenants(lambda: History(language.tokenizer)))
    said = [
        {"role": "user", "content": "do"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    text = render(prompts, ChatPrompt(said, tools=[TOOL])).text
    assert text.endswith('<user>do<assistant>({"a": 1})<tool>done')
    text = render(prompts, ChatPrompt(said)).text
    assert text == '<user>do<assistant>{"name": "f", "arguments": {"a": 1}}<tool>done'


def test_a_begun_answer_is_the_end_of_the_prompt(prompts):
    begun = [*CHAT.messages, {"role": "assistant", "content": "that is "}]
    text = render(prompts, ChatPrompt(begun, is_begun=True)).text
    assert text.endswith("<|im_start|>assistant\nthat is ")


def test_a_prompt_that_is_too_long_is_named_as_its_api_names_it(prompts):
    long = [{"role": "user", "content": "to be " * 1000}]
    with pytest.raises(ContextLengthError, match="your input resulted") as caught:
        render(prompts, ChatPrompt(long, param="input"))
    assert caught.value.param == "input"


def test_a_text_far_beyond_the_context_is_refused_before_it_is_encoded(prompts, language):
    """What is encoded of it does not grow with it."""
    encoded: list[int] = []
    encode = language.tokenizer.encode
    language.tokenizer.encode = lambda text: encoded.append(len(text)) or encode(text)  # type: ignore[method-assign]
    for text in ("to be or not " * 10**6, "x" * 10**7):
        for prompt in (TextPrompt(text), ChatPrompt([{"role": "user", "content": text}])):
            with pytest.raises(ContextLengthError, match=r"resulted in at least \d+ tokens"):
                render(prompts, prompt)
    assert max(encoded) < 100_000


def test_a_long_text_of_few_tokens_is_served(prompts, language):
    long_token = max(language.tokenizer.added_texts, key=len)
    text = long_token * (MAX_CTX_TOKENS - 1)
    assert len(text) > 8 * MAX_CTX_TOKENS
    assert len(render(prompts, TextPrompt(text)).ids) == MAX_CTX_TOKENS - 1


def test_an_answer_of_a_form_that_was_asked_for_is_no_call(language):
    """The JSON of a call is a call, unless the request constrains the text."""
    answers = AnswerFormat(calls=FORMATS["qwen-json"])
    prompts = Prompts(
        replace(language, answers=answers), Tenants(lambda: History(language.tokenizer))
    )
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = replace(CHAT, tools=[tool])
    written = '{"name": "f", "arguments": {}}'
    called = render(prompts, prompt).new_pieces().make(written, is_last=True)
    assert [type(piece) for piece in called] == [CallPiece, ArgumentsPiece]
    constraint = Constraint("json_object", "", "response_format")
    form = render(prompts, prompt, constraint=constraint).new_pieces()
    assert form.make(written, is_last=True) == (TextPiece(written),)


def said_by(roles: str) -> list[dict[str, str]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[letter], "content": "x"} for letter in roles]


@pytest.mark.parametrize(
    ("roles", "boundaries", "num_known", "is_unknown"),
    [
        ("su", [10, 20], 0, False),  # nothing was answered yet
        ("suau", [10, 20, 30, 40], 0, True),
        ("suau", [10, 20, 30, 40], 29, False),  # all but the end of the answer
        ("suauau", [10, 20, 30, 40, 50, 60], 29, True),
        ("suatt", [10, 20, 30, 40], 29, False),  # two results in one turn
        ("suatt", [10, 20, 30, 40], 15, True),
    ],
)
def test_answers_behind_what_is_remembered_are_unknown(roles, boundaries, num_known, is_unknown):
    assert has_unknown_answers(said_by(roles), boundaries, num_known) is is_unknown
