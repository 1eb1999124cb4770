"""The recall model: its texts, a step of its training, and a directory that an engine serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from eval_recall import DEPTHS, Question, answered, contexts
from recall.facts import (
    ASK,
    END,
    FACT,
    HOP,
    HOP_SLOTS,
    NUM_VALUES,
    SLOT_WORDS,
    Hop,
    Language,
    Writer,
    hop_places,
    value_places,
)
from recall.network import Network
from safetensors.torch import load_file
from train_recall import FORMS, Stage, Training, export
from transformers import AutoModelForCausalLM

from luceasync.config import (
    CacheConfig,
    Config,
    EngineConfig,
    KvFlashConfig,
    ModelConfig,
    ServerConfig,
)
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app

SMALL = FORMS["small"].language


@pytest.mark.parametrize("language", [SMALL, Language()])
def test_words_are_as_many_as_the_model_knows(language: Language):
    assert len(language.words) == len(set(language.words)) == language.vocab_size
    assert FORMS["full"].language.vocab_size == 2048


def test_every_question_asks_for_a_fact_that_stands_before_it():
    for row in Writer(SMALL, 3).rows(20, 1024, 16, 20, num_hops=2):
        slots, told, num_hops = row.reshape(-1, SLOT_WORDS).tolist(), {}, 0
        for number, slot in enumerate(slots):
            names, values = tuple(slot[1:3]), slot[3 : 3 + NUM_VALUES]
            if slot[0] == FACT:
                assert names not in told
                told[names] = values
            elif slot[0] == ASK:
                assert told[names] == values and slot[3 + NUM_VALUES] == END
            elif slot[0] == HOP:
                line = row[number * SLOT_WORDS :][: HOP_SLOTS * SLOT_WORDS].tolist()
                linked = tuple(told[names][:2])
                assert tuple(line[3:5]) == linked
                end = line.index(END)
                assert line[end - NUM_VALUES : end] == told[linked]
                num_hops += 1
        assert len(told) == 16 and num_hops == 2


def test_places_are_those_of_what_has_to_be_found():
    row = Writer(SMALL, 3).rows(1, 256, 4, 10)[0]
    places = value_places(row[None])[0]
    assert places.sum() == 10 * NUM_VALUES
    begins = np.flatnonzero(row == ASK)
    assert sorted(np.flatnonzero(places)) == sorted(b + 3 + i for b in begins for i in range(6))
    [row] = Writer(SMALL, 3).rows(1, 512, 8, 4, num_hops=1)
    begin = row.tolist().index(HOP)
    end = row.tolist().index(END, begin)
    wanted = [begin + 3, begin + 4, *range(end - NUM_VALUES, end)]
    assert np.flatnonzero(hop_places(row[None])[0]).tolist() == wanted


def test_a_hop_is_answered_as_rows_say_it():
    writer = Writer(SMALL, 5)
    fact, other = writer.facts(2)
    hop = Hop(fact.linked_to(other), other)
    row = Writer(SMALL, 3).rows(1, 512, 8, 4, num_hops=1)[0].tolist()
    begin = row.index(HOP)
    assert len(hop.question) + len(hop.answer) == row.index(END, begin) - begin
    assert hop.answer[:2] == list(other.names) and hop.answer[-NUM_VALUES:] == list(other.values)


def test_each_depth_has_its_questions_and_no_fact_is_asked_for_twice():
    found = [*contexts(SMALL, 2048, 32, 12)]
    assert len(found) == 2  # 8 of each kind in the first
    for context in found:
        asked = [q.prompt for q in context.questions]
        assert len(set(asked)) == len(asked)
    kinds = [q.kind for context in found for q in context.questions]
    assert all(kinds.count(kind) == 12 for kind in (*map(str, DEPTHS), "hop"))


def test_facts_lie_at_their_depths():
    writer = Writer(SMALL, 5)
    facts = writer.facts(3)
    context = writer.context(1600, facts, [0.0, 0.5, 1.0])
    slots = np.array(context).reshape(-1, SLOT_WORDS)
    assert np.flatnonzero(slots[:, 0] == FACT).tolist() == [0, 50, 99]
    assert slots[50, : 4 + NUM_VALUES].tolist() == facts[1].told(FACT)


def test_what_is_written_is_the_network_to_others(tmp_path: Path):
    form, tokens = FORMS["small"], torch.arange(40)[None]
    network = Network(form.sizes)
    export(network, form, tmp_path)
    network.take(load_file(tmp_path / "model.safetensors"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        ours = network.logits(network(tokens))
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
async def test_what_is_trained_learns_and_is_served_with_a_pool(tmp_path: Path, capsys):
    torch.manual_seed(0)
    form = replace(FORMS["small"], stages=(Stage(128, 4, 3, 5, 0, 1.1, 50),))
    Training(form, Network(form.sizes), 0, tmp_path).run()
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in _lines(capsys)]
    assert losses[-1] < losses[0]
    writer = Writer(SMALL, 1)
    [fact] = writer.facts(1)
    config = Config(
        model=ModelConfig(model_dir=tmp_path, dtype="fp32"),
        engine=EngineConfig(parallel=1, max_ctx_tokens=2048),
        cache=CacheConfig(memory_bytes=1 << 28),
        kvflash=KvFlashConfig(448),
    )
    async with build_engine(config) as engine:
        await engine.load()
        transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            question = Question("0.5", tuple(fact.question), fact.values)
            found = await answered(client, SMALL, writer.context(1024, [fact], [0.5]), question)
        assert found in (True, False)
        status = engine.status().residence
        assert status is not None and status.looks_total == 1


def _lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "loss " in line]
