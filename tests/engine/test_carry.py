"""A new field of a request touches the API family that parses it and the place that acts on it.

The toy field `greeting` is known to a toy family, a toy way to decode and a toy prefix cache; what
lies between hands it on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from luceasync.engine.decoding import PlainDecoding
from luceasync.engine.prepare import prepare
from luceasync.engine.prompts import Language
from luceasync.engine.pump import Pump
from luceasync.engine.sequence import Generation
from luceasync.request import ModelCard, Request, TokenPrompt
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer
from tests.engine.pumps import CountingTarget, make_pump, run
from tests.prompts import rendered


@dataclass(frozen=True, slots=True)
class ToyRequest(Request):
    greeting: str = ""


def parse(body: dict) -> ToyRequest:
    """What a family's parser would do with a body."""
    return ToyRequest(TokenPrompt(tuple(body["prompt"])), greeting=body["greeting"], max_tokens=2)


class ToyDecoding(PlainDecoding):
    """Acts on the field at each step."""

    def __init__(self, target: CountingTarget) -> None:
        super().__init__(target)
        self.seen: list[str] = []

    def step(self, generations, *, alone, meanwhile) -> None:
        self.seen += [g.prepared.request.greeting for g in generations]
        super().step(generations, alone=alone, meanwhile=meanwhile)


@pytest.fixture
def language(tiny_dir: Path) -> Language:
    tokenizer = Tokenizer.load(tiny_dir)
    card = ModelCard("tiny", 0, 64, 1, "qwen3")
    return Language(card, tokenizer, ChatTemplate.load(tiny_dir), vocab_size=300, num_lanes=2)


def submitted(language: Language) -> tuple[Pump, ToyDecoding, list[str]]:
    """A pump with one toy request; what its decoding and its prefix cache saw of the field."""
    target = CountingTarget()
    decoding, saved = ToyDecoding(target), []
    pump = make_pump(target, num_lanes=1, decoding=decoding)
    save_sequence = pump.lanes.prefixes.save_sequence

    def act(lease, *args, **options) -> None:
        saved.append(lease.request.greeting)
        save_sequence(lease, *args, **options)

    pump.lanes.prefixes.save_sequence = act
    request = parse({"prompt": [1, 2, 3], "greeting": "hello"})
    pump.submit(prepare(language, request, rendered(request.prompt.ids), stream_id=0))
    return pump, decoding, saved


@pytest.mark.any_family
def test_a_step_and_the_prefix_cache_see_the_field_of_the_request(language):
    pump, decoding, saved = submitted(language)
    run(pump)
    assert decoding.seen == ["hello"]
    assert saved == ["hello"]


@pytest.mark.any_family
def test_a_generation_that_waits_for_another_lane_keeps_it(language):
    [choice] = prepare(language, ToyRequest(TokenPrompt((1,)), greeting="hello"), rendered([1]), 0)
    generation = Generation(choice)
    generation.start(0)
    generation.append(2, None)
    before = generation.lease
    generation.leave_lane(None)
    assert generation.lease is not before
    assert generation.lease.request.greeting == "hello"
    assert generation.lease.rendered is choice.prompt
