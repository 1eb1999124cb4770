"""GGUF files of real models as transformers runs them, by the numbers that the package `gguf` makes
of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import torch

from luceasync.models.feed_forward.dense import DenseSpec
from luceasync.models.files import read_spec
from luceasync.models.mixers.attention import AttentionSpec
from tests.gguf.tiny_files import ARCHITECTURES, gguf_name

if TYPE_CHECKING:  # else only tests that build a model pay for it
    from transformers import PreTrainedModel


def as_transformers_runs_it(path: Path) -> PreTrainedModel:
    """The model of a dense family without scaled rope, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = read_spec(path)
    attention, feed_forward = spec.layers[0].mixer, spec.layers[0].feed_forward
    assert isinstance(attention, AttentionSpec) and isinstance(feed_forward, DenseSpec)
    config = AutoConfig.for_model(
        spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=feed_forward.inner_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=attention.num_heads,
        num_key_value_heads=attention.num_kv_heads,
        rms_norm_eps=spec.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": attention.rope_theta},
        tie_word_embeddings=spec.tied_embeddings,
    )
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    arch, state = ARCHITECTURES[spec.family], {}
    for name in spec.shapes():
        tensor = stored[gguf_name(name, arch)]
        own = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Neighbours of a head become its halves.
            heads = own.view(-1, attention.head_dim // 2, 2, own.shape[1])
            own = heads.transpose(1, 2).reshape(own.shape)
        state[name] = own
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its buffers are in no file
    assert not any(parameter.is_meta for parameter in model.parameters())
    return model.eval()
