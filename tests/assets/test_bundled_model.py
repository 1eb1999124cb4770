"""The shipped directory is complete, within its limits, and says what the training taught."""

import json

import pytest
import torch
import transformers
from safetensors import safe_open

from luceasync.config import BUNDLED_MODEL_DIR
from training.demo import wordings
from training.demo.dialogue import tools_section
from training.demo.evaluation import NUM_HELD_OUT, expected_ids, read_entries
from training.demo.export import CHAT_TEMPLATE, CONTROL_TOKENS, TEXT_TOKENS
from training.demo.questions import could_be_drawn

MAX_PARAMETERS = 16_000_000
MAX_MODEL_BYTES = 35_000_000
MAX_EVAL_BYTES = 150_000


@pytest.fixture(scope="module")
def config():
    return transformers.AutoConfig.from_pretrained(BUNDLED_MODEL_DIR)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(BUNDLED_MODEL_DIR)


@pytest.fixture(scope="module")
def weights():
    with safe_open(BUNDLED_MODEL_DIR / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def test_the_directory_is_complete_and_small():
    sizes = {path.name: path.stat().st_size for path in BUNDLED_MODEL_DIR.iterdir()}
    files = "config generation_config tokenizer tokenizer_config training".split()
    assert {f"{name}.json" for name in files} <= sizes.keys()
    assert {"README.md", "eval.jsonl", "dialogue.jsonl", "model.safetensors"} <= sizes.keys()
    assert sum(sizes.values()) <= MAX_MODEL_BYTES
    assert sizes["eval.jsonl"] <= MAX_EVAL_BYTES


def test_weights_are_few_finite_and_bfloat16(weights):
    assert sum(tensor.numel() for tensor in weights.values()) <= MAX_PARAMETERS
    assert all(tensor.dtype is torch.bfloat16 for tensor in weights.values())
    assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.slow
def test_embeddings_are_tied_and_as_large_as_the_vocabulary(config, tokenizer, weights):
    assert config.tie_word_embeddings and "lm_head.weight" not in weights
    embedding = weights["model.embed_tokens.weight"]
    assert embedding.shape == (config.vocab_size, config.hidden_size)
    assert len(tokenizer) == config.vocab_size == 8192


def test_layers_are_three_delta_nets_for_each_attention(config, weights):
    kinds = ["self_attn" if (i + 1) % 4 == 0 else "linear_attn" for i in range(12)]
    found = {name.split(".")[2]: name.split(".")[3] for name in weights if "_attn." in name}
    assert [found[str(i)] for i in range(config.num_hidden_layers)] == kinds


def test_turns_end_where_generation_stops(config, tokenizer):
    stops = json.loads((BUNDLED_MODEL_DIR / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == config.eos_token_id == stops[0]
    assert tokenizer.convert_tokens_to_ids("<|endoftext|>") == stops[1]


@pytest.mark.parametrize("text", ["json.dumps(obj)\n", "  naïve 日本 🐍\t", "a\r\nb", "`x`() 'y'?"])
def test_tokenizer_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_single_and_only_control_tokens_are_hidden(tokenizer):
    ids = [tokenizer.encode(token) for token in (*CONTROL_TOKENS, *TEXT_TOKENS)]
    assert all(len(pieces) == 1 for pieces in ids)
    shown = tokenizer.decode([i for pieces in ids for i in pieces], skip_special_tokens=True)
    assert shown == "".join(TEXT_TOKENS)


def test_template_renders_chatml(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "len?"}]},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nlen?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_puts_tools_into_the_system_turn(tokenizer):
    tools = [{"type": "function", "function": {"name": "read", "parameters": {}}}]
    asked = [{"role": "system", "content": "Hi"}, {"role": "user", "content": "len?"}]
    text = tokenizer.apply_chat_template(asked, tools=tools, tokenize=False)
    assert text.startswith(f"<|im_start|>system\nHi\n\n{tools_section(tools)}<|im_end|>\n")


def test_template_renders_tool_calls_and_their_results(tokenizer):
    call = {"type": "function", "function": {"name": "read", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "read", "arguments": {"a": 1}}\n</tool_call>'
        "<|im_end|>\n<|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
    )


def test_next_prompt_begins_with_this_prompt_and_its_answer(tokenizer):
    asked = [{"role": "user", "content": "len?"}]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answered = [*asked, {"role": "assistant", "content": " `len` \n"}, *asked]
    text = tokenizer.apply_chat_template(answered, tokenize=False)
    assert text.startswith(f"{prompt} `len` \n<|im_end|>\n")


def test_template_is_the_one_of_the_script():
    written = json.loads((BUNDLED_MODEL_DIR / "tokenizer_config.json").read_text())
    assert written["chat_template"] == CHAT_TEMPLATE


def test_evaluation_asks_200_names_in_held_out_wordings():
    entries = read_entries(BUNDLED_MODEL_DIR / "eval.jsonl")
    assert len(entries) == len({entry["name"] for entry in entries}) == NUM_HELD_OUT == 200
    assert {entry["template"] for entry in entries} == set(wordings.HELD_OUT_TEMPLATES)
    for entry in entries:
        before, _, after = entry["template"].partition("{n}")
        question = entry["messages"][0]["content"]
        assert question.startswith(before) and question.endswith(after)


@pytest.mark.slow
@pytest.mark.parametrize("template", wordings.HELD_OUT_TEMPLATES)
def test_training_cannot_draw_a_held_out_wording(template):
    assert not could_be_drawn(template)


def test_expected_tokens_are_32_or_end_with_the_answer(tokenizer):
    short = expected_ids(tokenizer.backend_tokenizer, "Goodbye!")
    assert tokenizer.decode(short) == "Goodbye!<|im_end|>"
    assert len(expected_ids(tokenizer.backend_tokenizer, "long " * 99)) == 32
