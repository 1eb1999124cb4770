"""GGUF files for what is done beside other programs: random weights in a well-known shape, and the
numbers of another file written out.

Random blocks are random bits with scales that keep activations their size; the vocabulary is made
up.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from luceasync.bench.shapes import Shape
from luceasync.gguf.header import TENSOR_TYPES

TYPES = {kind.name: kind for kind in TENSOR_TYPES.values()}
SCALES_AT = {"Q4_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,)}  # of fp16, in a block
SCALE = {"Q4_K": 2e-3, "Q6_K": 6e-5, "Q8_0": 2e-2}  # of numbers about 1 large
MIXES = ("Q4_K_M", "Q8_0")


def write_random(path: Path, shape: Shape, mix: str) -> Path:
    """A file of `shape`, which is Qwen3's, with tensors of the types of llama.cpp's `mix`."""
    layers, hidden, inner = (
        shape[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size")
    )
    heads, kv_heads, head_dim = (
        shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(layers)
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    _add_vocabulary(writer, shape["vocab_size"])
    random = np.random.default_rng(0)
    sizes = {
        "attn_q": (heads * head_dim, hidden),
        "attn_k": (kv_heads * head_dim, hidden),
        "attn_v": (kv_heads * head_dim, hidden),
        "attn_output": (hidden, heads * head_dim),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    norms = {"attn_norm": hidden, "ffn_norm": hidden, "attn_q_norm": head_dim}
    norms["attn_k_norm"] = head_dim
    head = "Q6_K" if mix == "Q4_K_M" else mix
    _add_matrix(writer, random, "token_embd.weight", (shape["vocab_size"], hidden), head)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        for name, size in norms.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
        for name, pair in sizes.items():
            kind = _kind(mix, name, layer, layers)
            _add_matrix(writer, random, f"blk.{layer}.{name}.weight", pair, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_plain(path: Path, to: Path) -> Path:
    """The file's numbers in float32: all else of it stays."""
    reader = gguf.GGUFReader(path)
    architecture = bytes(reader.fields["general.architecture"].parts[-1]).decode()
    writer = gguf.GGUFWriter(to, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture",):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, numbers.reshape(tuple(reversed(tensor.shape.tolist()))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def _kind(mix: str, name: str, layer: int, num_layers: int) -> str:
    """llama.cpp's rule: v and down of the outer eighths, and of every third layer between."""
    if mix != "Q4_K_M":
        return mix
    eighth = num_layers // 8
    is_outer = layer < eighth or layer >= 7 * num_layers // 8
    has_more = is_outer or (layer - eighth) % 3 == 2
    return "Q6_K" if has_more and name in ("attn_v", "ffn_down") else "Q4_K"


def _add_matrix(
    writer: gguf.GGUFWriter,
    random: np.random.Generator,
    name: str,
    shape: tuple[int, int],
    kind: str,
) -> None:
    rows, columns = shape
    block = TYPES[kind]
    blocks = columns // block.block_items
    stored = random.integers(0, 256, (rows, blocks, block.block_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = SCALE[kind] * columns**-0.5 * (7.5 if at == 2 else 1.0)
        scales = np.full((rows, blocks), scale, np.float16)
        stored[..., at : at + 2] = scales[..., None].view(np.uint8)
    data = stored.reshape(rows, -1)
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [chr(256 + i) for i in range(256 - len(printable))]
    tokens = [*map(chr, printable), *others]
    tokens += [f"<{i}>" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges([f"{tokens[0]} {tokens[1]}"])
    writer.add_eos_token_id(size - 1)
