"""GGUF files made by hand, byte by byte: also such as no program writes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
Value = int | float | bool | str | Sequence[int] | Sequence[str]
Tensors = Mapping[str, tuple[Sequence[int], int, int]]  # shape, rows first; type; bytes


def text(value: str | bytes) -> bytes:
    """A string as the format has it."""
    content = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(content)) + content


def value(content: Value) -> bytes:
    """A value with its type before it."""
    if isinstance(content, bool):
        return struct.pack("<I?", BOOL, content)
    if isinstance(content, int):
        return struct.pack("<II", U32, content)
    if isinstance(content, float):
        return struct.pack("<If", F32, content)
    if isinstance(content, str):
        return struct.pack("<I", STRING) + text(content)
    if content and isinstance(content[0], str):
        items = b"".join(map(text, content))
        return struct.pack("<IIQ", ARRAY, STRING, len(content)) + items
    return struct.pack(f"<IIQ{len(content)}i", ARRAY, I32, len(content), *content)


def header(
    keys: Mapping[str, Value | bytes],
    tensors: Tensors,
    *,
    version: int = 3,
    num_tensors: int | None = None,
    num_keys: int | None = None,
) -> bytes:
    """All up to where the numbers begin. A value of bytes stands as it is, its type in it."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    parts = [b"GGUF", struct.pack("<IQQ", version, *counts)]
    for key, content in keys.items():
        parts += [text(key), content if isinstance(content, bytes) else value(content)]
    begin = 0
    for name, (shape, kind, num_bytes) in tensors.items():
        parts += [text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))]
        parts.append(struct.pack("<IQ", kind, begin))
        begin += -(-num_bytes // 32) * 32
    joined = b"".join(parts)
    return joined + bytes(-len(joined) % 32)


def save(path: Path, begin: bytes, tensors: Tensors = MappingProxyType({})) -> Path:
    """The header and, as a hole, room for the numbers."""
    with path.open("wb") as file:
        file.write(begin)
        file.truncate(len(begin) + sum(-(-size // 32) * 32 for *_, size in tensors.values()))
    return path


def qwen3_keys(**other: Value | bytes) -> dict[str, Value | bytes]:
    """Of a model of two layers, 64 wide, with 8 tokens; `other` with __ for dots."""
    keys: dict[str, Value | bytes] = {
        "general.architecture": "qwen3",
        "qwen3.block_count": 2,
        "qwen3.context_length": 512,
        "qwen3.embedding_length": 64,
        "qwen3.feed_forward_length": 96,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-6,
        "qwen3.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|endoftext|>", "<|im_end|>", "c", "d", "e"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return keys | {name.replace("__", "."): content for name, content in other.items()}


def qwen3_tensors(num_layers: int = 2) -> dict[str, tuple[Sequence[int], int, int]]:
    """Of that model, float32 norms and Q4_0 matrices."""

    def plain(*shape: int) -> tuple[Sequence[int], int, int]:
        return shape, 0, 4 * shape[0]

    def four(rows: int, columns: int) -> tuple[Sequence[int], int, int]:
        return (rows, columns), 2, rows * columns // 32 * 18

    layer = {
        "attn_norm": plain(64),
        "ffn_norm": plain(64),
        "attn_q": four(128, 64),
        "attn_k": four(64, 64),
        "attn_v": four(64, 64),
        "attn_output": four(64, 128),
        "attn_q_norm": plain(32),
        "attn_k_norm": plain(32),
        "ffn_gate": four(96, 64),
        "ffn_up": four(96, 64),
        "ffn_down": four(64, 96),
    }
    blocks = {f"blk.{i}.{n}.weight": t for i in range(num_layers) for n, t in layer.items()}
    return {"token_embd.weight": four(8, 64), "output_norm.weight": plain(64)} | blocks
