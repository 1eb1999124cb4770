"""Initial weights of the recall model: a guess at how facts are found, all of which is then
trained.

From random weights, induction heads form late: for hundreds of steps a network copies values from
anywhere in a slot. So heads of the first layer initially attend one, two, ... tokens back, and
those of the next layers copy the tokens that follow the same two words (Olsson et al., 2022).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from training.recall.network import ROPE_THETA, Network, Sizes

EMBEDDING_STD = 0.25
CONSTANT = 4 * EMBEDDING_STD  # of every token, in channel 0: heads recognise positions by it
NUM_COPYING = 2  # layers that look for words and copy the tokens after them
NEAR, FAR = 0.05, 1e-4  # radians a token: pairs above tell neighbours apart, these distant places
FAR_SHARE = 0.3
STILL_SHARE = 5 / 8  # pairs from there on hardly turn: words are compared in them


@torch.no_grad()
def begin(network: Network) -> None:
    """Set all weights; random ones with torch's generator."""
    sizes = network.sizes
    nn.init.normal_(network.embed_tokens.weight, std=EMBEDDING_STD)
    network.embed_tokens.weight[:, 0] = CONSTANT
    # Logits of deviation 1.
    network.norm.weight.fill_(1 / (EMBEDDING_STD * sizes.hidden_size**0.5))
    for layer in network.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for matrix in (attention.q_proj, attention.k_proj, attention.v_proj):
            nn.init.normal_(matrix.weight, std=sizes.hidden_size**-0.5)
        for matrix in (mlp.gate_proj, mlp.up_proj):
            nn.init.normal_(matrix.weight, std=0.02)
        nn.init.normal_(mlp.down_proj.weight, std=0.02 * EMBEDDING_STD)
        _copy_what_is_seen(attention, sizes)
    first, *others = (layer.self_attn for layer in network.layers)
    words, brought = _bring_what_stands_before(first, sizes)
    for number, attention in enumerate(others[:NUM_COPYING]):
        _look_for_words(attention, sizes, number, words, brought)
    for attention in others[NUM_COPYING:]:
        attention.o_proj.weight *= FAR_SHARE


def _copy_what_is_seen(attention: nn.Module, sizes: Sizes) -> None:
    """Let heads output the embedding that they attend to, as far as it fits into their few
    dimensions.
    """
    dim, group = sizes.head_dim, sizes.num_heads // sizes.num_kv_heads
    for head in range(sizes.num_heads):
        seen = attention.v_proj.weight[head // group * dim :][:dim]
        attention.o_proj.weight[:, head * dim :][:, :dim] = seen.T / group * EMBEDDING_STD


def _bring_what_stands_before(attention: nn.Module, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Head 0 attends to the previous token, head 1 to the one before that, and so on. Returns the
    rows that read words [kv_heads * head_dim, hidden], and the directions in which heads output
    them [hidden, heads * head_dim].
    """
    dim, half = sizes.head_dim, sizes.head_dim // 2
    turns = ROPE_THETA ** (-torch.arange(half) * 2.0 / dim)  # radians a token
    share = torch.where(turns >= NEAR, 1.0, torch.where(turns >= FAR, FAR_SHARE, 0.0)).sqrt()
    query, key, value = attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
    query.zero_(), key.zero_()
    value[:, 0] = 0
    for head in range(sizes.num_kv_heads):
        key[head * dim :, 0][:half] = share
    for head in range(sizes.num_heads):
        angles = (head + 1) * turns  # rotated back by that many tokens
        query[head * dim :, 0][:half] = share * angles.cos()
        query[head * dim + half :, 0][:half] = -share * angles.sin()
    brought = attention.o_proj.weight
    nn.init.normal_(brought, std=0.7 * EMBEDDING_STD / dim**0.5)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(2.5)
    return value.clone(), brought / brought.norm(dim=0)


def _look_for_words(
    attention: nn.Module, sizes: Sizes, number: int, words: Tensor, brought: Tensor
) -> None:
    """Every head looks for tokens preceded by two words: its own token and the one before. `number`
    is the index of the layer; each kv head compares different dimensions of the words.
    """
    dim, half = sizes.head_dim, sizes.head_dim // 2
    still = int(half * STILL_SHARE)
    places = [*range(still, half), *range(half + still, dim)]
    count = len(places) // 2
    own, before = places[::2][:count], places[1::2][:count]
    query, key = attention.q_proj.weight, attention.k_proj.weight
    query *= 0.1
    key *= 0.1
    group = sizes.num_heads // sizes.num_kv_heads
    for head in range(sizes.num_heads):
        kv_head = head // group
        # From the output of heads 0 and 1 of the first layer: both read the same rows.
        first = (number * sizes.num_kv_heads + kv_head) * count % (dim - count + 1)
        one, two = brought[:, first:][:, :count].T, brought[:, dim + first :][:, :count].T
        query[[head * dim + place for place in own]] = words[first:][:count]
        query[[head * dim + place for place in before]] = one
        key[[kv_head * dim + place for place in own]] = one
        key[[kv_head * dim + place for place in before]] = two
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(2.0)
