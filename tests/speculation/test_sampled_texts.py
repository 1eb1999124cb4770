"""At a temperature above 0, texts are distributed as plain sampling distributes them, with the
model's own head and with copies: real passes and proposals, exact shares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from luceasync.models.files import ModelFiles
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.request import Sampling
from luceasync.speculation.choice import RoundPlan, RoundShape
from luceasync.speculation.dflash.load import load_mtp
from luceasync.speculation.dflash.placement import plan_with_drafter
from luceasync.speculation.lookup import LOOKUP, LookupDrafter, lookup_shapes
from luceasync.speculation.mtp import mtp_of
from luceasync.speculation.speculator import Speculator
from luceasync.text.tokenizer import Tokenizer
from tests.engine.choices import make_choice
from tests.speculation import mtp_models
from tests.speculation.scripted import Lanes
from tests.speculation.test_mtp import SHAPE, config_of

NUM_SAMPLES, NUM_LANES = 400, 20  # many at once: a round of one costs as much
ALLOWED = (40, 41, 42, 43)  # tokens that follow each other in the model's cycle
PROMPT = (40, 41, 42, 43) * 3
SAMPLING = Sampling(temperature=1.0, logit_bias=dict.fromkeys(ALLOWED, 60.0))


class Sampled:
    """A model whose next token is one of four, and a drafter for it."""

    def __init__(self, folder: Path, drafter: str) -> None:
        model_dir = mtp_models.save(folder, cycle=4)
        config, files = config_of(model_dir, ("cpu:0",)), ModelFiles(model_dir)
        config = replace(config, engine=replace(config.engine, parallel=NUM_LANES))
        report, _ = plan_with_drafter(config, files)
        mtp = mtp_of(config, files, report.plan.devices, report.plan.precision)
        self.backend = LayerSplitBackend.open(files, report.plan, taps=mtp.taps)
        self.speculator, self._close = load_mtp(mtp, report.plan, self.backend, files.weights.open)
        self.shape = SHAPE
        if drafter == LOOKUP:
            copies = LookupDrafter(lookup_shapes([SHAPE.block]), NUM_LANES)
            self.speculator = Speculator(self.backend, [copies], NUM_LANES)
            self.shape = RoundShape(SHAPE.block, None, LOOKUP)
        self.tokenizer = Tokenizer.load(model_dir)

    def pairs(self) -> tuple[Counter, int]:
        """How often each pair of tokens came behind the first, and how many were accepted."""
        counts, num_accepted = Counter(), 0
        for begin in range(0, NUM_SAMPLES, NUM_LANES):
            choices = [self._choice(seed) for seed in range(begin, begin + NUM_LANES)]
            lanes = Lanes(self.backend, choices, self.speculator)
            while lanes.running:
                numbers = tuple(g.lane for g in lanes.running)
                paths = lanes.round(list(lanes.running), RoundPlan(self.shape, numbers, False))
                num_accepted += sum(len(path) - 1 for path in paths)
            counts.update(answer.token_ids for answer in lanes.answers())
        return counts, num_accepted

    def _choice(self, seed: int):
        return make_choice(
            PROMPT,
            tokenizer=self.tokenizer,
            stream_id=seed,
            max_tokens=3,
            sampling=SAMPLING,
            seed=seed,
        )

    def shares(self) -> dict[tuple[int, ...], float]:
        """The exact probability of each text of three tokens, by plain passes."""
        return {
            (a, b, c): first * second * third
            for a, first in self._next(())
            for b, second in self._next((a,))
            for c, third in self._next((a, b))
        }

    def _next(self, said: tuple[int, ...]) -> list[tuple[int, float]]:
        self.backend.reset(0)
        logits = self.backend.prefill(0, 0, (*PROMPT, *said), project=True)
        shares = logits[list(ALLOWED)].double().softmax(0)
        return list(zip(ALLOWED, shares.tolist(), strict=True))

    def close(self) -> None:
        self._close()
        self.backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", LOOKUP])
def test_texts_are_distributed_as_plain_sampling(tmp_path, drafter):
    sampled = Sampled(tmp_path, drafter)
    with torch.inference_mode():
        shares, (counts, num_accepted) = sampled.shares(), sampled.pairs()
    sampled.close()
    assert counts.keys() <= shares.keys() and sum(counts.values()) == NUM_SAMPLES
    assert num_accepted > NUM_SAMPLES / 8, "rows that were proposed are accepted here"
    # Texts that are too rare to be counted one by one are counted together.
    rare = {text for text, share in shares.items() if share * NUM_SAMPLES < 5}
    cells = [(counts[text], share) for text, share in shares.items() if text not in rare]
    cells.append((sum(counts[t] for t in rare), sum(shares[t] for t in rare)))
    expected = torch.tensor([share * NUM_SAMPLES for _, share in cells if share])
    found = torch.tensor([float(count) for count, share in cells if share])
    chi_squared = ((found - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2)
    assert len(expected) > 4
    assert torch.special.gammaincc(freedom, chi_squared / 2) > 0.01
