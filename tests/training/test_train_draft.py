"""Training a drafter: what it is shown, what counts, and that it is the network that is served."""

import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from luceasync.models.files import read_spec
from luceasync.models.ops import TorchOps
from luceasync.speculation.dflash.draft import open_network
from luceasync.speculation.dflash.draft_config import parse_draft_spec, read_draft_spec
from luceasync.speculation.dflash.draft_spec import DraftLayerSpec
from tests import tiny
from tests.gguf.tiny_files import Tiny, write
from training.draft import losses
from training.draft.answers import answer
from training.draft.evaluation import draft, walk
from training.draft.export import load_run, save_run, write_draft
from training.draft.muon import Muon, orthogonal
from training.draft.network import Drafter
from training.draft.store import FeatureStore
from training.draft.target import FrozenTarget
from training.draft.texts import Layout
from training.draft.training import Recipe, learning_rate, make_optimizers
from training.train_draft import main

CPU = torch.device("cpu")
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}


@pytest.fixture(scope="module", params=tiny.FAMILIES)
def models(request, tmp_path_factory):
    """(the model in transformers, the frozen target, its directory)"""
    model = tiny.build(request.param)
    folder = tiny.save(model, tmp_path_factory.mktemp(request.param))
    return model, FrozenTarget(folder, torch.float32, CPU), folder


def filled(target, texts, row_tokens=96, taps=(0, 1, 2), block=8):
    capacity = sum(len(text.ids) for text in texts)
    store = FeatureStore(target, taps, capacity=capacity, row_tokens=row_tokens, block=block)
    store.fill(texts)
    return store


def own_answers(target, num_prompts=3, length=40):
    rng = random.Random(3)
    prompts = [rng.choices(range(4, 500), k=12 + i) for i in range(num_prompts)]
    return answer(target, prompts, length, temperature=0)


def test_taps_are_the_residual_stream_after_a_layer(models):
    model, target, _ = models
    ids = torch.randint(4, 500, (2, 70), generator=torch.manual_seed(0))
    features, rows = target.run(ids, (0, 2))
    with torch.no_grad():
        truth = model(ids, output_hidden_states=True)
    wanted = torch.cat([truth.hidden_states[1], truth.hidden_states[3]], -1)
    torch.testing.assert_close(features, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(target.choices(rows), truth.logits.argmax(-1))


@pytest.mark.slow
def test_own_answers_are_what_the_target_generates(models):
    model, target, _ = models
    for text in own_answers(target):
        begin = int(text.said.argmax())
        prompt = torch.tensor(text.ids[None, :begin], dtype=torch.int64)
        told = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False
        )
        assert told[0].tolist() == text.ids.tolist() and text.said[begin:].all()


def test_what_the_target_would_not_say_is_not_counted(models):
    _, target, _ = models
    text = own_answers(target, num_prompts=1)[0]
    begin = int(text.said.argmax())
    text.ids[begin + 20] = (text.ids[begin + 20] + 1) % 500 + 4
    store = filled(target, [text])
    true = store.true[: len(text.ids)]
    assert not true[:begin].any() and true[begin : begin + 20].all() and not true[begin + 20]


@pytest.mark.slow
def test_slots_behind_the_end_of_an_answer_do_not_count(models):
    _, target, _ = models
    texts = own_answers(target)
    store, end = filled(target, texts), len(texts[0].ids)
    batch = store.batch(store.begins[:1], torch.tensor([[end - 4, end - 1]]))
    assert batch.counted[0].sum(-1).tolist() == [3, 0]
    assert batch.blocks[0, 0, :4].tolist() == texts[0].ids[-4:].tolist()


@pytest.mark.slow
def test_anchors_are_drawn_from_answers_only(models):
    _, target, _ = models
    texts = own_answers(target)
    batch = filled(target, texts).draw(8, 16, 0.5, torch.Generator().manual_seed(0))
    assert batch.counted.any(-1).all()
    assert (batch.places.rows[..., 0] >= 12).all()  # the shortest prompt


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, SLIDING])
def test_the_network_in_training_is_the_one_that_is_served(models, tmp_path, fields):
    model, target, _ = models
    spec = parse_draft_spec(tiny.draft_config(**fields), target.spec)
    drafter = randomised(spec, target)
    write_draft(drafter, target.spec, tmp_path)
    assert read_draft_spec(tmp_path, target.spec) == spec
    sizes = {"num_lanes": 1, "max_ctx_tokens": 128, "dtype": torch.float32, "device": CPU}
    served = open_network(tmp_path, spec, TorchOps(), model.get_input_embeddings(), **sizes)
    store = filled(target, own_answers(target))
    begin, anchor = int(store.begins[1]), 30
    batch = store.batch(store.begins[:1], torch.tensor([[begin + anchor]]))
    lane = torch.tensor([0])
    features = store.features[None, begin : begin + anchor]
    with torch.no_grad():
        served.write_context(features, lane, lane * 0, lane + anchor)
        rows = served.propose(batch.blocks[0, :, 0], lane, lane + anchor, 8)
        torch.testing.assert_close(draft(drafter, target, batch)[0], rows, atol=2e-4, rtol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, SLIDING, SLIDING | {"sliding_window": 3}])
def test_a_shorter_block_is_trained_as_it_is_served(models, fields):
    _, target, _ = models
    spec = parse_draft_spec(tiny.draft_config(**fields), target.spec)
    drafter, texts = randomised(spec, target), own_answers(target)
    short = filled(target, texts, block=5)
    store, anchors = filled(target, texts), torch.tensor([[20]])
    batch = store.batch(store.begins[:1], anchors, torch.full_like(anchors, 5))
    with torch.no_grad():
        rows = draft(drafter, target, batch)
        wanted = draft(drafter, target, short.batch(store.begins[:1], anchors))
    assert rows.isfinite().all() and batch.counted.sum() == 4
    torch.testing.assert_close(rows[..., :4, :], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_share_of_the_blocks_is_drawn_shorter(models):
    _, target, _ = models
    store = filled(target, own_answers(target, length=60))
    generator = torch.Generator().manual_seed(0)
    lengths = store.draw(64, 16, 0.5, generator).places.there.sum(-1)
    assert lengths.min() == 2 and 0.4 < (lengths < 8).float().mean() < 0.6
    assert (store.draw(64, 16, 0.0, generator).places.there.sum(-1) == 8).all()


def randomised(spec, target):
    """A drafter that bfloat16 can hold."""
    torch.manual_seed(4)
    drafter = Drafter(spec, target.norm.weight)
    for parameter in drafter.parameters():
        fresh = torch.randn_like(parameter) * (
            parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.1
        )
        parameter.data = (fresh + (parameter.dim() == 1)).bfloat16().float()
    return drafter


@pytest.mark.slow
def test_a_sequence_sees_nothing_of_the_one_packed_before_it(models):
    _, target, _ = models
    spec = parse_draft_spec(tiny.draft_config(), target.spec)
    store = filled(target, own_answers(target))
    drafter, begin = randomised(spec, target), int(store.begins[1])
    packed = store.batch(store.begins[:1], torch.tensor([[begin + 20]]))
    alone = store.batch(store.begins[1:2], torch.tensor([[20]]))
    with torch.no_grad():
        both = draft(drafter, target, packed), draft(drafter, target, alone)
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)


def test_layout_marks_what_the_target_said(models):
    _, _, folder = models
    layout = Layout(folder, {2}, max_tokens=100)
    text = layout.lay({"messages": [{"role": "user", "content": "to"}], "answer": "be"})
    said = text.ids[text.said].tolist()
    assert said == [*layout._tokenizer.encode("be"), 2]
    prompt = layout.prompt({"messages": [{"role": "user", "content": "to"}]})
    assert text.ids[: len(prompt)].tolist() == prompt and not text.said[: len(prompt)].any()
    assert layout.lay({"text": "to be"}).said.all()
    with pytest.raises(ValueError, match="'messages', 'text' or 'ids'"):
        layout.lay({"prompt": "to"})


def test_rounds_are_walked_as_the_loop_would():
    matched = torch.zeros(1, 12, 7, dtype=torch.bool)
    matched[0, 3, :2] = True  # at the first token two drafts are right: three tokens
    matched[0, 6] = True  # then all of them, of which the answer has five
    inside = torch.zeros(1, 12, dtype=torch.bool)
    inside[0, 3:12] = True
    assert walk(matched, inside) == (8, 2)


def test_dynamic_weights_are_the_gradient_of_the_expected_length():
    slots = torch.tensor([0.2, 0.9, 0.4, 3.0])
    chance = 0.5 + 0.5 * (-slots).exp()
    prefix = chance.cumprod(0)
    wanted = [prefix[k:].sum() for k in range(4)]
    counted = torch.ones(4, dtype=torch.bool)
    torch.testing.assert_close(losses.dynamic_weights(slots, counted), torch.stack(wanted))


def test_losses_among_fewer_tokens_are_those_of_the_whole_vocabulary_for_the_tokens_there():
    torch.manual_seed(0)
    head, rows = torch.randn(30, 8), torch.randn(2, 3, 3, 8)
    known = torch.tensor([3, 7, 8, 20])
    blocks = known[torch.randint(4, (2, 3, 4))]
    choices = losses.Choices(head, known, num_others=5)
    generator = torch.Generator().manual_seed(1)
    seen = set()
    for _ in range(20):
        few, places = choices.draw(blocks, generator)
        assert len(few) == 9 and torch.equal(few[places], head[blocks])
        seen |= {int((head == row).all(1).nonzero()) for row in few}
        exact = (F.linear(rows, few).logsumexp(-1) - (rows * few[places[..., 1:]]).sum(-1)).float()
        torch.testing.assert_close(losses.slot_losses(rows, few, places), exact)
    assert len(seen) == 30  # every other token in its turn


def test_decaying_weights_fall_by_gamma():
    weights = losses.decaying_weights(torch.zeros(2, 5), gamma=4.0)
    torch.testing.assert_close(weights[1, 4], torch.tensor(np.exp(-1.0), dtype=torch.float32))


def test_muon_pushes_singular_values_towards_one():
    torch.manual_seed(0)
    for shape in ((2, 16, 40), (2, 40, 16)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.4


def test_muon_learns():
    torch.manual_seed(0)
    goal, matrix = torch.randn(16, 8), torch.nn.Parameter(torch.zeros(16, 8))
    optimizer = Muon([matrix], lr=0.1, weight_decay=0.0)
    for _ in range(200):
        optimizer.zero_grad()
        (matrix - goal).square().sum().backward()
        optimizer.step()
    assert (matrix - goal).square().mean() < 0.02


def test_learning_rate_warms_up_and_falls():
    recipe = Recipe(steps=1000)
    rates = [learning_rate(recipe, step, step / 1000) for step in (0, 99, 500, 999)]
    shares = [rate / recipe.peak_lr for rate in rates]
    assert shares == pytest.approx([0.01, 0.976, 0.505, 0.01], rel=0.02)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_run_goes_on_where_it_stood(models, tmp_path, optimizer):
    _, target, _ = models
    spec = parse_draft_spec(tiny.draft_config(), target.spec)
    drafter, other = (Drafter(spec, target.norm.weight) for _ in range(2))
    optimizers, others = (make_optimizers(d, Recipe(optimizer=optimizer)) for d in (drafter, other))
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in optimizers:
        each.step()
    save_run(tmp_path / "run.safetensors", drafter, optimizers, {"step": 5})
    assert load_run(tmp_path / "run.safetensors", other, others) == {"step": 5}
    for d, each in ((drafter, optimizers), (other, others)):
        for parameter in d.parameters():
            parameter.grad = torch.ones_like(parameter)
        for one in each:
            one.step()
    assert all(map(torch.equal, drafter.parameters(), other.parameters()))


@pytest.mark.slow
def test_smoke_run_writes_a_drafter_and_goes_on(tmp_path, monkeypatch, capsys):
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path / "target")
    lines = [{"messages": [{"role": "user", "content": "to be"}], "answer": "or not to be"}] * 12
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = (
        f"training.train_draft --target {folder} --data {tmp_path}/data.jsonl "
        f"--out {tmp_path}/draft --resume {tmp_path}/run.safetensors "
        "--answers 4 --answer-tokens 30 --held-out 2 "
        "--layers 2 --intermediate 32 --heads 2 --kv-heads 1 --head-dim 16 --taps 0 2 --block 4 "
        "--mask-token 3 --row-tokens 64 --num-rows 2 --num-anchors 8 --device cpu "
        "--other-tokens 40 --steps"
    )
    for num_steps in ("4", "6"):
        monkeypatch.setattr("sys.argv", [*command.split(), num_steps])
        main()
    assert "going on from step 4" in capsys.readouterr().out
    spec = read_draft_spec(tmp_path / "draft", read_spec(folder))
    assert (spec.taps, spec.block, spec.layers) == ((0, 2), 4, (DraftLayerSpec(None, False),) * 2)
    record = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert record["steps"] == 6 and [score["step"] for score in record["scores"]] == [4, 6]


def test_a_gguf_files_target_is_that_of_its_numbers(tmp_path):
    targets = [
        FrozenTarget(path, torch.float32, CPU)
        for path in write(Tiny("qwen2", {"embd.weight": "F32", "": "Q8_0"}), tmp_path)
    ]
    ids = torch.randint(4, 250, (1, 40), generator=torch.manual_seed(0))
    (features, rows), (others, other_rows) = (target.run(ids, (0, 2)) for target in targets)
    torch.testing.assert_close(features, others, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(rows, other_rows, atol=1e-4, rtol=1e-4)


def test_tokens_of_answers_are_taken_as_they_are(models):
    text = Layout(models[2], {2}, max_tokens=6).lay({"ids": [9, 8, 7, 6, 5, 4, 3], "begin": 2})
    assert text.ids.tolist() == [9, 8, 7, 6, 5, 4]
    assert text.said.tolist() == [False, False, True, True, True, True]
