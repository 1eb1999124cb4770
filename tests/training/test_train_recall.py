"""The recall model: its texts, a step of its training, and a directory that an engine serves."""

from __future__ import annotations

import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from luceasync.config import KvFlashConfig
from luceasync.engine.start import build_engine
from luceasync.server.app import create_app
from luceasync.server_config import ServerConfig
from luceasync.text.tokenizer import Tokenizer
from training.eval_recall import DEPTHS, config_of, contexts, shares_of
from training.recall.beginning import begin
from training.recall.facts import (
    ASK,
    END,
    FACT,
    HOP,
    MASK,
    NUM_VALUES,
    SLOT_WORDS,
    Hop,
    Language,
    Writer,
    hop_places,
    value_places,
)
from training.recall.network import Network
from training.train_recall import FORMS, Form, Training, export

SMALL = FORMS["small"].language


@pytest.mark.parametrize("language", [SMALL, Language()])
def test_words_are_as_many_as_the_model_knows(language: Language):
    assert len(language.words) == len(set(language.words)) == language.vocab_size
    assert FORMS["full"].language.vocab_size == 2048


def test_every_question_asks_for_a_fact_that_stands_before_it():
    for row in Writer(SMALL, 3).rows(20, 1024, 16, 20, num_hops=2).tolist():
        told, num_asked, num_hops = {}, 0, 0
        for at, kind in enumerate(row):
            names, values = tuple(row[at + 1 : at + 3]), row[at + 3 : at + 3 + NUM_VALUES]
            if kind == FACT:
                assert names not in told
                told[names] = values
            elif kind == ASK:
                assert told[names] == values and row[at + 3 + NUM_VALUES] == END
                num_asked += 1
            elif kind == HOP:
                linked, end = tuple(told[names][:2]), row.index(END, at)
                assert tuple(row[at + 3 : at + 5]) == linked
                assert row[end - NUM_VALUES : end] == told[linked]
                num_hops += 1
        assert (len(told), num_asked, num_hops) == (16, 20, 2)


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
    begins = [at for at, token in enumerate(context) if token == FACT]
    assert [at // SLOT_WORDS for at in begins] == [0, 50, 99]
    assert context[begins[1] :][: 4 + NUM_VALUES] == facts[1].told(FACT)


def test_what_is_written_is_the_network_to_others(tmp_path: Path):
    form, tokens = FORMS["small"], torch.arange(40)[None]
    network = Network(form.sizes)
    export(network, form, tmp_path)
    network.take(load_file(tmp_path / "model.safetensors"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        ours = network.logits(network(tokens))
        torch.testing.assert_close(ours, theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def test_a_drafter_finds_the_mask_that_texts_never_use(tmp_path: Path):
    export(Network(FORMS["small"].sizes), FORMS["small"], tmp_path)
    assert Tokenizer.load(tmp_path).token_id("<|mask|>") == MASK
    assert not (Writer(SMALL, 3).rows(4, 512, 8, 4, num_hops=1) == MASK).any()


def in_few_rows(form: Form) -> Form:
    """It learns as much from them as from more, by its steps alone, however long they take; most of
    the last ones would make it surer, not better.
    """
    stages = zip(form.stages, (8, 2, 2), strict=True)
    *few, last = (replace(stage, num_rows=rows) for stage, rows in stages)
    return replace(form, stages=(*few, replace(last, most_steps=30)), seconds=math.inf)


@pytest.mark.slow
@pytest.mark.first
async def test_what_has_learnt_finds_what_is_away(tmp_path: Path):
    """As in docs/results/kvflash.md, in small: whole servers, free-running."""
    torch.manual_seed(0)
    form, network = in_few_rows(FORMS["small"]), Network(FORMS["small"].sizes)
    begin(network)
    Training(form, network, 0, tmp_path).run()
    args = Namespace(
        form="small", model_dir=tmp_path, context=1024, questions=8, dtype="fp32", device=None,
        draft=None,
    )  # fmt: skip
    found = {}
    for policy in ("all", "qk", "lru"):
        kvflash = KvFlashConfig() if policy == "all" else KvFlashConfig(448, policy)
        async with build_engine(config_of(args, kvflash)) as engine:
            await engine.load()
            transport = httpx.ASGITransport(create_app(engine, ServerConfig()))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as c:
                found[policy] = await shares_of(c, args, num_facts=8)
    far = [*map(str, DEPTHS[:2])]
    share = {policy: np.mean([shares[depth] for depth in far]) for policy, shares in found.items()}
    assert share["all"] >= 0.6
    assert share["qk"] >= 0.9 * share["all"]
    assert share["lru"] <= 0.3  # little that is far back is here, and nothing comes back
