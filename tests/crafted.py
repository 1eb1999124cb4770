"""A real Qwen3 model with weights set by hand, which says any text that it was made for.

A prompt that contains "~NAME" makes it say the text of that name, token for token; the last such
mark counts, within 15,000 tokens. So whatever a model could write goes through tokens, detokenizer,
parsers and APIs. A text may contain the mark of another one, which the model says in its next turn.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HEAD_DIM = 128  # at most as many texts
SLOW, NEAR = 63, 32  # dimensions of a key: rotated hardly with distance, and more
MLP_DIM = 64
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
CONST, IS_MARK, FIRST = 0, 1, 2  # hidden dimensions: always 1; 1 for marks; of pieces and texts


def save(
    directory: Path,
    texts: Mapping[str, str],
    template: str,
    max_tokens: int = 8192,
    words: Path | None = None,
    added: Sequence[str] = ADDED,
) -> Path:
    """Write a model that says each of `texts` where a prompt marks its name, and has the chat
    `template`, a context of `max_tokens` and `added` tokens. Names consist of ASCII letters and
    digits; no name begins with another, and at most one text has the mark of each. Prompts are read
    byte by byte, or in the words of the model whose folder is `words`.
    """
    assert 0 < len(texts) <= HEAD_DIM
    vocabulary = _Vocabulary.of(texts, [] if words is None else _merges(words))
    tokenizer = vocabulary.tokenizer(added)
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    vocab_size = -(-tokenizer.get_vocab_size() // 64) * 64
    weights = _weights(vocabulary, vocab_size, end)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": weights["model.embed_tokens.weight"].shape[1],
        "intermediate_size": MLP_DIM,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": max_tokens,
        "rope_theta": 1e8,  # dimension NEAR turns by a quarter of a circle in 15,708 tokens
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|im_end|>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@dataclass(frozen=True)
class _Vocabulary:
    """Token ids: `marks` by name, `pieces` of each text in order, marks among them; `merges` make
    the marks, and words.
    """

    ids: dict[str, int]
    marks: dict[str, int]
    pieces: dict[str, list[int]]
    merges: list[tuple[str, str]]

    @classmethod
    def of(cls, texts: Mapping[str, str], words: Sequence[tuple[str, str]]) -> _Vocabulary:
        ids = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        marks, merges = {}, []
        for name in texts:
            mark = "~"
            for char in name:
                if (mark, char) not in merges:
                    merges.append((mark, char))
                mark += char
                ids.setdefault(mark, len(ids))
            marks[name] = ids[mark]
        for left, right in words:
            merges.append((left, right))
            ids.setdefault(left + right, len(ids))
        pieces: dict[str, list[int]] = {}
        rng = random.Random(5)
        for name in sorted(texts, key=lambda name: len(texts[name])):  # short ones have less choice
            spelled = _split(_spelled(texts[name]), set(ids), rng, [f"~{each}" for each in texts])
            pieces[name] = [ids.setdefault(piece, len(ids)) for piece in spelled]
        said = [token for each in pieces.values() for token in each]
        assert len(said) == len(set(said)), "a mark stands in two texts"
        return cls(ids, marks, pieces, merges)

    def tokenizer(self, added: Sequence[str]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(vocab=self.ids, merges=self.merges))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = byte_level
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(list(SPECIAL))
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
        return tokenizer


def _merges(folder: Path) -> list[tuple[str, str]]:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    return [(left, right) for left, right in model["merges"]]


def _spelled(text: str) -> str:
    """The bytes of `text`, each as the character that stands for it in a byte-level vocabulary."""
    [(spelled, _)] = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    ).pre_tokenize_str(text)
    return spelled


def _split(spelled: str, used: set[str], rng: random.Random, marks: Sequence[str]) -> list[str]:
    """Split `spelled` into its `marks` and, between them, pieces that differ from one another and
    from those in `used`.
    """
    pieces: list[str] = []
    for part in re.split(f"({'|'.join(marks)})", spelled):
        pieces += [part] if part in marks else _pieces(part, used | set(pieces), rng)
    return pieces


def _pieces(spelled: str, used: set[str], rng: random.Random) -> list[str]:
    for _ in range(2000):
        pieces: list[str] = []
        begin = 0
        while begin < len(spelled):
            sizes = rng.sample(range(2, 40), 38)
            found = (spelled[begin : begin + size] for size in sizes)
            piece = next((p for p in found if p not in used and p not in pieces), None)
            if piece is None:
                break
            pieces.append(piece)
            begin += len(piece)
        else:
            return pieces
    raise ValueError(f"cannot be split into pieces of its own: {spelled!r}")


def _weights(vocabulary: _Vocabulary, vocab_size: int, end: int) -> dict[str, torch.Tensor]:
    """The weights, by name.

    No two tokens of the texts are alike, so each token determines the next. The first one is
    determined by the last mark in the prompt, which is one token. An attention head looks for it: a
    slow dimension of its keys tells marks from other tokens, a faster one near marks from far ones.
    """
    names = list(vocabulary.marks)
    pieces = [token for name in names for token in vocabulary.pieces[name]]
    piece_dims = {token: FIRST + i for i, token in enumerate(pieces)}
    mark_dims = {name: FIRST + len(pieces) + i for i, name in enumerate(names)}
    said_dims = {name: FIRST + len(pieces) + len(names) + i for i, name in enumerate(names)}
    hidden = -(-(FIRST + len(pieces) + 2 * len(names) + 1) // 64) * 64
    padding = hidden - 1
    scale = (3 / hidden) ** 0.5  # of every embedding: the root of its mean square

    embedding = torch.zeros(vocab_size, hidden)
    embedding[:, CONST] = 1
    embedding[:, padding] = 2**0.5
    for token, dim in piece_dims.items():
        embedding[token, dim] = embedding[token, padding] = 1
    for name, token in vocabulary.marks.items():
        embedding[token, mark_dims[name]] = embedding[token, IS_MARK] = 1
        embedding[token, padding] = 0  # in a text its norm is greater, which scales it and no more

    query, key = torch.zeros(HEAD_DIM, hidden), torch.zeros(HEAD_DIM, hidden)
    value, output = torch.zeros(HEAD_DIM, hidden), torch.zeros(hidden, HEAD_DIM)
    query[SLOW, CONST] = query[NEAR, CONST] = 1
    key[SLOW, CONST], key[SLOW, IS_MARK], key[NEAR, IS_MARK] = -1, 2, 1
    for i, name in enumerate(names):
        value[i, mark_dims[name]] = 1
        output[said_dims[name], i] = scale**2
    query_norm = torch.zeros(HEAD_DIM)
    query_norm[SLOW], query_norm[NEAR] = 2e4, 1e6

    head = torch.zeros(vocab_size, hidden)
    head[end, CONST] = 4
    for name in names:
        said = vocabulary.pieces[name]
        head[said[0], said_dims[name]] = 80  # with `scale` far above the rest, at any temperature
        for token, following in zip(said, [*said[1:], end], strict=True):
            head[following, piece_dims[token]] = 320

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
        f"{layer}self_attn.q_proj.weight": query,
        f"{layer}self_attn.k_proj.weight": key,
        f"{layer}self_attn.v_proj.weight": value,
        f"{layer}self_attn.o_proj.weight": output,
        f"{layer}self_attn.q_norm.weight": query_norm,
        f"{layer}self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        f"{layer}input_layernorm.weight": torch.ones(hidden),
        f"{layer}post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}mlp.gate_proj.weight": torch.zeros(MLP_DIM, hidden),
        f"{layer}mlp.up_proj.weight": torch.zeros(MLP_DIM, hidden),
        f"{layer}mlp.down_proj.weight": torch.zeros(hidden, MLP_DIM),
    }
