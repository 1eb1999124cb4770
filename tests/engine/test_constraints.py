"""An answer of which something is asked is that, with a drafter and without."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from luceasync.config import Config, DraftConfig, EngineConfig, ModelConfig, PlacementConfig
from luceasync.engine.engine import LocalEngine
from luceasync.engine.start import build_engine
from luceasync.errors import RequestError
from luceasync.grammar import matcher
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    ChatPrompt,
    Constraint,
    ReasoningPiece,
    Request,
    Sampling,
)
from tests import tiny
from tests.processes import placed
from tests.stages import in_stages

pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_family,
    pytest.mark.usefixtures("forked_backends"),
]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
END = 2  # the tiny model's token
SCHEMA = Constraint("json_schema", json.dumps(PERSON), "response_format.json_schema.schema")
PHONE = Constraint("regex", r"[0-9]{3}-[0-9]{4}( ext [0-9]{1,3})?", "guided_regex")
CHOICE = Constraint("choice", json.dumps(["yes", "no", 'né\n"?"']), "guided_choice")
LARK = Constraint("grammar", 'start: "(" start ")" | /[a-c]{1,4}/', "grammar")
LIMITED = Constraint("grammar", 'start: word ("." word)*\nword[max_tokens=2]: /[a-z]+/', "grammar")

REQUESTS: list[dict[str, Any]] = [
    {"constraint": SCHEMA, "max_tokens": 200},
    {"constraint": SCHEMA, "max_tokens": 200, "sampling": Sampling(temperature=1.0, seed=1)},
    {
        "constraint": SCHEMA,
        "max_tokens": 200,
        "sampling": Sampling(temperature=1.5, top_p=0.9, seed=2, repetition_penalty=1.2),
        "top_logprobs": 2,
    },
    {"constraint": PHONE, "sampling": Sampling(temperature=1.0, seed=3), "max_tokens": 40},
    {"constraint": CHOICE, "sampling": Sampling(temperature=1.0, seed=4), "num_choices": 3},
    {"constraint": LARK, "sampling": Sampling(temperature=0.8, top_k=4, seed=5)},
    {"sampling": Sampling(temperature=1.0, seed=6)},
    {"constraint": LIMITED, "max_tokens": 30},
    {"constraint": LIMITED, "sampling": Sampling(temperature=1.0, seed=7), "max_tokens": 30},
]


@asynccontextmanager
async def started(
    model_dir: Path, placement: PlacementConfig | None = None, **draft: Any
) -> AsyncIterator[LocalEngine]:
    engine = build_engine(
        Config(
            model=ModelConfig(model_dir=model_dir, dtype="fp32"),
            placement=placement or PlacementConfig(),
            engine=EngineConfig(max_ctx_tokens=1024, parallel=4),
            draft=DraftConfig(**draft),
        )
    )
    async with engine:
        await engine.load()
        yield engine


async def ask(engine: LocalEngine, text: str, **fields: Any) -> list[tuple[str, str | None]]:
    """The text of each choice, and why it ended."""
    request = Request(
        ChatPrompt([{"role": "user", "content": text}]), **{"max_tokens": 60, **fields}
    )
    texts, ends = [""] * request.num_choices, [""] * request.num_choices
    async for delta in await engine.open(request):
        texts[delta.index] += delta.text
        if delta.finish is not None:
            ends[delta.index] = delta.finish.error or delta.finish.reason
    return list(zip(texts, ends, strict=True))


PAIRS = [(f"question {i}", fields) for i, fields in enumerate(REQUESTS)]


async def ask_all(engine: LocalEngine) -> list[list[tuple[str, str | None]]]:
    """The answers to all together."""
    return await asyncio.gather(*(ask(engine, text, **fields) for text, fields in PAIRS))


@pytest.fixture(scope="module")
def plain(tiny_dir: Path) -> list[list[tuple[str, str | None]]]:
    """What is said without a drafter in one stage, to each alone and to all together."""

    async def said() -> list[list[tuple[str, str | None]]]:
        async with started(tiny_dir, draft_dir="none") as engine:
            alone = [await ask(engine, text, **fields) for text, fields in PAIRS]
            together = await ask_all(engine)
        assert alone == together
        return together

    return asyncio.run(said())


def is_person(text: str) -> bool:
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and len(found["name"]) <= 12
        and 0 <= found["age"] <= 150
        and set(found["tags"]) <= {"red", "green"}
        and len(found["tags"]) <= 3
    )


def test_every_answer_is_what_was_asked_for(plain):
    *persons, phones, choices, nested, _, greedy, drawn = plain
    for [(text, reason)] in persons:
        assert reason == "stop" and is_person(text)
    assert re.fullmatch(PHONE.source, phones[0][0]) and phones[0][1] == "stop"
    assert {text for text, _ in choices} <= set(json.loads(CHOICE.source))
    assert {reason for _, reason in choices} == {"stop"}
    assert re.fullmatch(r"\(*[a-c]{1,4}\)*", nested[0][0])
    for [(text, reason)] in (greedy, drawn):
        assert reason in ("stop", "length") and re.fullmatch(r"[a-z.]+", text)


@pytest.mark.covered(1)
@pytest.mark.parametrize("tree", [{}, {"ddtree": True, "ddtree_budget": 12}], ids=["chain", "tree"])
async def test_a_drafter_changes_no_answer(tiny_dir, tmp_path, tree, plain):
    """How many steps it saves depends on what rounds cost here; see the next tests."""
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    async with started(tiny_dir, draft_dir=draft_dir, **tree) as engine:
        assert await ask_all(engine) == plain
        assert engine.status().speculation.rounds_total > 0


@pytest.mark.covered(1)
@pytest.mark.parametrize("where", ["three groups", "three processes"])
async def test_where_the_logits_lie_changes_no_answer(tiny_dir, tmp_path, where, plain):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    placement, num_stages = PlacementConfig(), 1
    if where == "three groups":
        num_stages = 3
    else:
        placement = placed(tmp_path, "three")
    with in_stages(num_stages) if num_stages > 1 else nullcontext():
        async with started(tiny_dir, placement, draft_dir=draft_dir) as engine:
            assert await ask_all(engine) == plain


async def test_what_must_come_is_accepted_at_once(tiny_dir, tmp_path):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    only = Constraint("choice", json.dumps(["the one answer that there is"]), "guided_choice")
    request = Request(ChatPrompt([{"role": "user", "content": "x"}]), constraint=only)
    async with started(tiny_dir, draft_dir=draft_dir) as engine:
        deltas = [delta async for delta in await engine.open(request)]
    speculation = deltas[-1].finish.speculation
    assert "".join(delta.text for delta in deltas) == "the one answer that there is"
    assert speculation.accept_rate > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_what_goes_against_a_grammar_only_slows_it(tiny_dir, temperature):
    """Biases against all that may come, an end that is not one, a stop string in the middle."""
    against = dict.fromkeys(range(tiny.VOCAB_SIZE), -100.0)
    sampling = Sampling(temperature=temperature, seed=7, logit_bias=against, presence_penalty=2.0)
    async with started(tiny_dir) as engine:
        [(text, reason)] = await ask(engine, "a", constraint=PHONE, sampling=sampling)
        assert re.fullmatch(PHONE.source, text) and reason == "stop"
        [(text, reason)] = await ask(engine, "b", constraint=PHONE, ignore_eos=True)
        assert re.fullmatch(PHONE.source, text) and reason == "stop"
        [(text, reason)] = await ask(engine, "c", constraint=PHONE, stop=("-",))
        assert re.fullmatch("[0-9]{3}", text) and reason == "stop"
        [(text, reason)] = await ask(engine, "d", constraint=PHONE, max_tokens=2)
        assert re.fullmatch("[0-9]{2}", text) and reason == "length"


AMBIGUOUS = Constraint("grammar", 'start: e\ne: e e e | e e | "a" | "b"', "guided_grammar")


async def test_an_answer_that_is_costly_to_follow_ends_and_the_others_do_not(tiny_dir, monkeypatch):
    """Each token may cost 0.2 ms of processor time here; without a limit 200 take seconds."""
    monkeypatch.setattr(matcher, "STOCK_S", 0.01)
    monkeypatch.setattr(matcher, "TOKEN_S", 0.0002)
    drawn = {"sampling": Sampling(temperature=1.0, seed=1), "max_tokens": 200, "min_tokens": 200}
    async with started(tiny_dir) as engine:
        begin = time.process_time()
        costly, beside, known = await asyncio.gather(
            ask(engine, "a", constraint=AMBIGUOUS, **drawn),
            ask(engine, "b", **drawn),
            ask(engine, "c", constraint=PHONE),
        )
        assert time.process_time() - begin < 5.0
        [(text, end)] = costly
        assert 0 < len(text) < 200 and set(text) <= {"a", "b"}
        assert end == f"the grammar of the answer cannot be followed further: {matcher.TOO_COSTLY}"
        assert beside[0][1] == "length" and re.fullmatch(PHONE.source, known[0][0])


async def test_a_costly_answer_without_an_end_does_not_stop_as_if_it_were_whole(
    tiny_dir, monkeypatch
):
    async with started(tiny_dir) as engine:
        [(text, end)] = await ask(engine, "a", constraint=PHONE, ignore_eos=True)
        assert re.fullmatch(PHONE.source, text) and end == "stop"
        monkeypatch.setattr(matcher, "STOCK_S", 0.0)
        monkeypatch.setattr(matcher, "TOKEN_S", 0.0)
        [(_, end)] = await ask(engine, "a", constraint=PHONE, ignore_eos=True)
    assert end is not None and end.endswith(matcher.TOO_COSTLY)


async def test_a_schema_that_does_not_compile_says_where(tiny_dir):
    broken = replace(
        SCHEMA, source=json.dumps({"type": "object", "properties": {"a": {"type": "strin"}}})
    )
    async with started(tiny_dir) as engine:
        with pytest.raises(RequestError) as caught:
            await ask(engine, "a", constraint=broken)
        assert caught.value.param == "response_format.json_schema.schema.properties.a"
        assert "Invalid type: strin" in str(caught.value)
        [(text, _)] = await ask(engine, "a", constraint=PHONE)
    assert re.fullmatch(PHONE.source, text)


@pytest.fixture
def thinking_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A model whose prompts open its reasoning, and whose template shows how it calls."""
    folder = tmp_path / "thinking"
    shutil.copytree(tiny_dir, folder)
    call = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ args }}}</tool_call>'
    args = "{% set args = c.function.arguments | tojson %}"
    calls = "{% for c in m.tool_calls or [] %}" + args + call + "{% endfor %}"
    template = tiny.CHATML.replace("{{ m.content }}", "{{ m.content }}" + calls)
    template = template.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert calls in template and "<think>" in template
    (folder / "chat_template.jinja").write_text(template)
    return folder


async def pieces_of(
    engine: LocalEngine, prompt: ChatPrompt, **fields: Any
) -> tuple[list[Any], str]:
    request = Request(prompt, **{"max_tokens": 200, **fields})
    pieces, reason = [], ""
    async for delta in await engine.open(request):
        pieces += delta.pieces
        if delta.finish is not None:
            reason = delta.finish.error or delta.finish.reason
    return pieces, reason


@pytest.mark.covered(1)
@pytest.mark.parametrize(
    "draft", [{}, {"ddtree": True, "ddtree_budget": 12}], ids=["chain", "tree"]
)
async def test_a_grammar_begins_where_reasoning_ends_and_that_ends_in_time(
    thinking_dir, tmp_path, draft
):
    draft_dir = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    prompt = ChatPrompt([{"role": "user", "content": "x"}])
    answers = []
    for drafter in ({}, {"draft_dir": draft_dir, **draft}):
        async with started(thinking_dir, **drafter) as engine:
            for temperature in (0.0, 1.0):
                pieces, reason = await pieces_of(
                    engine,
                    prompt,
                    constraint=SCHEMA,
                    most_reasoning_tokens=9,
                    sampling=Sampling(temperature=temperature, seed=1),
                )
                thought = "".join(p.text for p in pieces if isinstance(p, ReasoningPiece))
                text = "".join(p.text for p in pieces if not isinstance(p, ReasoningPiece))
                assert reason == "stop" and is_person(text) and thought
                answers.append((thought, text))
    assert answers[:2] == answers[2:]


async def test_reasoning_ends_in_time_where_nothing_else_is_asked(thinking_dir):
    prompt = ChatPrompt([{"role": "user", "content": "x"}])
    async with started(thinking_dir) as engine:
        pieces, _ = await pieces_of(engine, prompt, most_reasoning_tokens=0, max_tokens=40)
        assert not any(isinstance(p, ReasoningPiece) for p in pieces) and pieces
        pieces, _ = await pieces_of(engine, prompt, max_tokens=40, ignore_eos=True)
    assert all(isinstance(p, ReasoningPiece) for p in pieces)


async def test_calls_are_forced_after_reasoning(thinking_dir):
    person = {"type": "function", "function": {"name": "person", "parameters": PERSON}}
    prompt = ChatPrompt(
        [{"role": "user", "content": "x"}], tools=[person], must_call=("person",), max_calls=1
    )
    async with started(thinking_dir) as engine:
        pieces, reason = await pieces_of(
            engine,
            prompt,
            most_reasoning_tokens=5,
            sampling=Sampling(temperature=1.0, seed=2),
        )
    [call] = [p for p in pieces if isinstance(p, CallPiece)]
    arguments = "".join(p.text for p in pieces if isinstance(p, ArgumentsPiece))
    assert (call.name, reason) == ("person", "stop") and is_person(arguments)


async def test_no_call_can_be_forced_without_a_known_format(tiny_dir, tmp_path):
    folder = tmp_path / "unknown"
    shutil.copytree(tiny_dir, folder)
    (folder / "chat_template.jinja").write_text("{{ tools }}" + tiny.CHATML)
    tool = {"type": "function", "function": {"name": "f"}}
    prompt = ChatPrompt([{"role": "user", "content": "x"}], tools=[tool], must_call=("f",))
    async with started(folder) as engine:
        with pytest.raises(RequestError) as caught:
            await engine.open(Request(prompt))
    assert caught.value.param == "tool_choice"


async def test_an_answer_that_would_end_at_once_has_its_least_tokens(tiny_dir, tmp_path):
    wants_end = Sampling(logit_bias={END: 100.0})
    draft = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    told = []
    for options in ({}, {"draft_dir": draft}):
        async with started(tiny_dir, **options) as engine:
            for least in (0, 1, 7):
                stream = await engine.open(
                    Request(
                        ChatPrompt([{"role": "user", "content": "x"}]),
                        sampling=wants_end,
                        min_tokens=least,
                    )
                )
                ids = [i for delta in [d async for d in stream] for i in delta.token_ids]
                assert len(ids) == least + 1 and ids.index(END) == least
                told.append(ids)
    assert told[:3] == told[3:]


async def test_a_tools_schema_that_does_not_compile_says_where_its_body_has_it(thinking_dir):
    parameters = {"type": "object", "properties": {"a": {"type": "strin"}}}
    function = {"name": "f", "parameters": parameters}
    prompt = ChatPrompt(
        [{"role": "user", "content": "x"}],
        tools=[{"type": "function", "function": function}],
        must_call=("f",),
    )
    async with started(thinking_dir) as engine:
        for places in ((), ("tools[3].input_schema",)):
            where = places[0] if places else "tools[0].function.parameters"
            with pytest.raises(RequestError) as caught:
                await engine.open(Request(replace(prompt, schema_places=places)))
            assert caught.value.param == f"{where}.properties.a"
