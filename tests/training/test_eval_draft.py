"""The loop that counts tau: its text is the target's own, whatever the drafter proposes."""

import pytest
import torch

from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import read_draft_spec
from tests import tiny
from training.draft.answers import answer
from training.draft.target import FrozenTarget
from training.eval_draft import Rounds, report, speculate

CPU = torch.device("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_text_is_that_of_the_target_alone(tmp_path, family):
    model = tiny.build(family)
    target = FrozenTarget(tiny.save(model, tmp_path / "target"), torch.float32, CPU)
    folder = tiny.save_draft(tmp_path / "draft", tiny.draft_config())
    spec = read_draft_spec(folder, target.spec)
    sizes = {"num_lanes": 1, "max_ctx_tokens": 128, "dtype": torch.float32, "device": CPU}
    drafter = open_network(folder, spec, TorchOps(), model.get_input_embeddings(), **sizes)
    prompts = [[5, 6, 7, 8], list(range(20, 50))]
    for prompt, told in zip(prompts, answer(target, prompts, 30, temperature=0), strict=True):
        rounds = speculate(target, drafter, prompt, 30)
        assert rounds.ids[: len(told.ids)] == told.ids.tolist()
        assert sum(rounds.emitted) == len(rounds.ids) - len(prompt) - 1


def test_the_report_counts_the_bonus(capsys):
    report([Rounds([], [8, 4]), Rounds([], [3])], block=8)
    shown = capsys.readouterr().out
    assert "15 tokens in 3 rounds" in shown and "tau 5.000 at block 8" in shown
    assert "1.000 1.000 1.000 0.667 0.333 0.333 0.333 0.333" in shown
