"""The spec of a GGUF model, and the stored tensor for each tensor of the spec.

Checks everything about a header before any weight is read. Pure: no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.gguf.header import SUPPORTED, TensorHeader
from luceasync.gguf.layout import AxisSwap, AxisSwaps, GgufLayout
from luceasync.gguf.model import GgufModel
from luceasync.gguf.vocabulary import check_tokenizer
from luceasync.models.encodings import DenseEncoding, Encoding, Shape
from luceasync.models.families import GGUF_FAMILIES
from luceasync.models.families.family import ConfigFields
from luceasync.models.quant import ggml
from luceasync.models.quant.encoding import QuantEncoding
from luceasync.models.quant.layout import BLOCK
from luceasync.models.spec import ModelSpec

SUPPRESSED = "tokenizer.ggml.suppress_tokens"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Rows [begin, begin + shape[0]) of a tensor in a file; `shape` is that of the spec."""

    path: Path
    tensor: TensorHeader
    begin: int
    shape: Shape
    orders: AxisSwaps

    @property
    def encoding(self) -> Encoding:
        """The encoding on a device."""
        encoding = ggml.held(self.tensor.type.name, self.tensor.shape[-1])
        if encoding is None:
            return DenseEncoding()
        columns = self.orders.columns
        return encoding.with_supergroups_within(columns.shape[2]) if columns else encoding


@dataclass(frozen=True, slots=True)
class GgufContents:
    """A model with its spec. `stored`: by the tensor names of the spec."""

    model: GgufModel
    spec: ModelSpec
    stored: dict[str, GgufTensor]


def read_gguf(model: GgufModel) -> GgufContents:
    """Check the headers of a model against its spec. Raises ModelError naming the file."""
    layout = GgufLayout(model)
    try:
        check_tokenizer(model.metadata)
        spec = GGUF_FAMILIES[model.architecture].parse(ConfigFields(layout.config))
        spec = replace(spec, suppressed=_suppressed(model, spec.vocab_size))
        stored = {name: _stored(layout, name, shape) for name, shape in spec.shapes().items()}
        drafting = spec.mtp_shapes()
        if all(layout.where(name).name in model.tensors for name in drafting):
            stored |= {name: _stored(layout, name, shape) for name, shape in drafting.items()}
        used = {found.tensor.name for found in stored.values()}
        used |= {layout.where(name).name for name in spec.unread}
        for name in sorted(model.tensors.keys() - used):
            if not layout.is_for_others(name):
                raise ModelError(f"no layer uses the tensor {name!r}")
    except ModelError as error:
        raise ModelError(f"{model.path}: {error}") from None
    return GgufContents(model, spec, stored)


def _suppressed(model: GgufModel, vocab_size: int) -> tuple[int, ...]:
    """The tokens that are never chosen, if the file names any."""
    ids = model.metadata.integers(SUPPRESSED) if SUPPRESSED in model.metadata else ()
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ModelError(f"{SUPPRESSED} has {token_id}; expected token ids below {vocab_size}")
    return tuple(sorted(set(ids)))


def _stored(layout: GgufLayout, name: str, shape: Shape) -> GgufTensor:
    where = layout.where(name)
    found = layout.model.tensors.get(where.name)
    if found is None:
        raise ModelError(f"there is no tensor {where.name!r}")
    path, tensor = found
    kind, rows, own = tensor.type.name, tensor.shape[0], _squeezed(shape)
    if kind not in SUPPORTED:
        raise ModelError(
            f"{where.name!r} is stored as {kind}, which is not supported; "
            f"supported: {', '.join(SUPPORTED)}"
        )
    if where.expert is not None:
        expected = (layout.config["num_experts"], where.num_parts * own[0], own[1])
        if tensor.shape != expected:
            raise ModelError(f"{where.name!r} has shape {tensor.shape}; expected {expected}")
    elif tensor.shape != own[own[0] == 1 :]:
        is_there = rows == own[0] or (where.name.endswith("attn_qkv.weight") and rows > own[0])
        if tensor.shape[1:] != own[1:] or not is_there or where.begin + own[0] > rows:
            raise ModelError(f"{where.name!r} has shape {tensor.shape}; expected {own}")
    stored = GgufTensor(path, tensor, where.begin, shape, where.orders)
    if isinstance(stored.encoding, QuantEncoding):
        _check_quantised(stored, stored.encoding)
    return stored


def _check_quantised(stored: GgufTensor, encoding: QuantEncoding) -> None:
    """Check that the tensor may be quantised, and that its columns can be reordered."""
    name, columns = stored.tensor.name, stored.orders.columns
    if len(stored.shape) != 2:
        raise ModelError(f"{name!r} is stored as {encoding.name}; expected F32, F16 or BF16")
    if columns is not None and not _moves(columns, encoding):
        raise ModelError(
            f"{name!r} is stored as {encoding.name}: cannot reorder heads of {columns.shape[2]} "
            f"columns; expected multiples of {max(BLOCK, encoding.group or 0)}"
        )


def _moves(columns: AxisSwap, encoding: QuantEncoding) -> bool:
    width = columns.shape[2]
    return width % BLOCK == 0 and encoding.group is not None and width % encoding.group == 0


def _squeezed(shape: Shape) -> Shape:
    """Drop inner dimensions of 1, which are missing in a file."""
    return (shape[0], *(size for size in shape[1:] if size > 1)) if len(shape) > 2 else shape
