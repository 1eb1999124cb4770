"""The recall model: its texts, a step of its training, and a directory that an engine serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from eval_recall import answered
from recall.facts import ASK, END, FACT, NUM_VALUES, SLOT_WORDS, Language, Writer, value_places
from train_recall import FORMS, Stage, export, train

from luceasync.config import CacheConfig, Config, EngineConfig, KvFlashConfig, ModelConfig
from luceasync.engine.start import build_engine

SMALL = FORMS["small"].language


@pytest.mark.parametrize("language", [SMALL, Language()])
def test_words_are_as_many_as_the_model_knows(language: Language):
    assert len(language.words) == len(set(language.words)) == language.vocab_size
    assert FORMS["full"].language.vocab_size == 2048


def test_every_question_asks_for_a_fact_that_stands_before_it():
    for seed in range(20):
        slots = Writer(SMALL, seed).row(512, 6, 20).reshape(-1, SLOT_WORDS)
        told = {}
        for slot in slots.tolist():
            names, values = tuple(slot[1:3]), slot[3 : 3 + NUM_VALUES]
            if slot[0] == FACT:
                assert names not in told
                told[names] = values
            elif slot[0] == ASK:
                assert told[names] == values and slot[3 + NUM_VALUES] == END
        assert len(told) == 6


def test_places_are_those_of_asked_values():
    row = Writer(SMALL, 3).row(256, 4, 10)
    places = value_places(row[None])[0]
    assert places.sum() == 10 * NUM_VALUES
    begins = np.flatnonzero(row == ASK)
    assert sorted(np.flatnonzero(places)) == sorted(b + 3 + i for b in begins for i in range(6))


def test_facts_lie_at_their_depths():
    writer = Writer(SMALL, 5)
    facts = writer.facts(3)
    context = writer.context(1600, facts, [0.0, 0.5, 1.0])
    slots = np.array(context).reshape(-1, SLOT_WORDS)
    assert np.flatnonzero(slots[:, 0] == FACT).tolist() == [0, 50, 99]
    assert slots[50, : 4 + NUM_VALUES].tolist() == facts[1].told(FACT)


@pytest.mark.slow
async def test_what_is_trained_learns_and_is_served_with_a_pool(tmp_path: Path, capsys):
    torch.manual_seed(0)
    form = replace(FORMS["small"], stages=(Stage(128, 4, 3, 5, 50),))
    network = train(form, 0, torch.device("cpu"))
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in _lines(capsys)]
    assert losses[-1] < losses[0]
    export(network, form, tmp_path)
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
        found = await answered(engine, writer.context(1024, [fact], [0.5]), fact)
        assert found in (True, False)
        status = engine.status().residence
        assert status is not None and status.looks_total == 1


def _lines(capsys) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if "loss " in line]
