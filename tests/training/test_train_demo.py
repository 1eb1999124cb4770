"""The recipe of the bundled model: its data, its network and its layout are what they should be."""

import json
import random

import pytest
import torch
import transformers

from training.demo.corpus import MAX_PART_CHARS, collect, split_doc
from training.demo.dialogue import Dialogue
from training.demo.export import export, train_tokenizer
from training.demo.network import CHUNK_TOKENS, Network, NetworkConfig, inverse_unit_lower
from training.demo.questions import could_be_drawn, mistype
from training.demo.rows import Layout, Rows
from training.train_demo import main

TINY = NetworkConfig(
    vocab_size=400,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    head_dim=16,
    linear_head_dim=16,
)


@pytest.fixture(scope="module")
def corpus():
    return collect(frozenset({"bisect", "json"}))


@pytest.fixture(scope="module")
def dialogue(corpus):
    return Dialogue(corpus)


@pytest.fixture(scope="module")
def tokenizer(corpus):
    return train_tokenizer([item.answer for item in corpus.items], TINY.vocab_size)


@pytest.fixture(scope="module")
def exported(tokenizer, tmp_path_factory):
    torch.manual_seed(0)
    network = Network(TINY)
    for parameter in network.parameters():  # what bfloat16 cannot hold would differ in the file
        parameter.data = parameter.data.bfloat16().float()
    out = tmp_path_factory.mktemp("exported")
    export(network, tokenizer, out)
    return network, out


def test_network_computes_what_transformers_computes(exported):
    network, out = exported
    peer = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab_size, (2, 3 * CHUNK_TOKENS))
    with torch.no_grad():
        torch.testing.assert_close(network(ids), peer(ids).logits, atol=1e-4, rtol=1e-4)


def test_layout_is_the_chat_template_in_ids(exported, dialogue, tokenizer):
    peer = transformers.AutoTokenizer.from_pretrained(exported[1])
    rng, layout = random.Random(1), Layout(tokenizer)
    for _ in range(50):
        turns = dialogue.draw(rng)
        messages = [{"role": role, "content": text} for role, text in turns]
        ids, _ = layout.lay(turns)
        rendered = peer.apply_chat_template(messages, tokenize=False)
        assert peer.decode(ids) == rendered + "<|endoftext|>"
        assert ids[:-1] == peer.encode(rendered)


def test_only_answers_and_their_ends_are_learnt(tokenizer):
    ids, learnt = Layout(tokenizer).lay([("user", "len?"), ("assistant", "A number.")])
    kept = [i for i, keep in zip(ids, learnt, strict=True) if keep]
    assert tokenizer.decode(kept, skip_special_tokens=False) == "A number.<|im_end|>"


def test_same_seed_gives_the_same_rows(dialogue, tokenizer):
    first, second = (next(iter(Rows(dialogue, tokenizer, 2, 128, seed=5))) for _ in range(2))
    other = next(iter(Rows(dialogue, tokenizer, 2, 128, seed=6)))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert not torch.equal(first[0], other[0])


def test_block_inverse_undoes_the_triangle():
    torch.manual_seed(0)
    lower = 0.3 * torch.randn(2, 64, 64, dtype=torch.float64).tril(-1)
    eye = torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(inverse_unit_lower(lower) @ (eye + lower), eye.expand(2, 64, 64))


def test_corpus_names_things_as_people_write_them(corpus):
    items = {item.name: item for item in corpus.items}
    assert items["len"].answer.startswith("`len(obj, /)`\n\nReturn the number of items")
    assert items["str.join"].owner == "str" and "self" not in items["str.join"].signature
    assert items["json.dumps"].kind == "function" and "json" in corpus.members


def test_parts_of_a_docstring_are_cut_at_paragraphs():
    doc = "\n\n".join([f"Paragraph {i} {'x' * 200}." for i in range(9)])
    parts = split_doc(doc)
    assert len(parts) == 2 and all(len(part) <= MAX_PART_CHARS for part in parts)
    assert doc.startswith("\n\n".join(parts))


def test_a_plain_wording_could_be_drawn():
    assert could_be_drawn("what does {n} do") and could_be_drawn("Hey, explain {n}. Thanks.")


def test_a_typing_mistake_changes_one_place():
    rng = random.Random(2)
    typed = {mistype(rng, "describe") for _ in range(200)}
    assert len(typed) > 20 and all(abs(len(word) - 8) <= 1 for word in typed)


@pytest.mark.slow
def test_smoke_run_writes_a_directory_that_transformers_loads(tmp_path, monkeypatch):
    words = ["train_demo", "--smoke", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    main()
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 30 and record["final_loss"] < 6.2
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3_5_text"
