"""GGUF files in float32, made of other files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np


def write_plain(path: Path, to: Path) -> Path:
    """Write the file's numbers in float32 and everything else of it unchanged."""
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
