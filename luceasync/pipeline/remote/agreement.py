"""What both ends of a channel must agree on before a layer is loaded: weights, dtypes, layers.

Each end reads it for itself. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.models.directory import CONFIG
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision


def dtype_words(precision: Precision) -> str:
    """The dtypes of weights, computation, and keys and values, as the command line has them."""
    return f"{precision.weights}/{precision.compute}/{precision.kv}"


def states_of(model: ModelFiles, dtype: str, layers: str) -> dict[str, str]:
    """The states of a stage in the greeting. `layers`: "begin:end". Raises ModelError."""
    weights = digest_of(model.path, model.weights.paths)
    num_layers = model.spec.num_layers
    return {
        "weights": weights,
        "dtype": dtype,
        "layers": f"{layers} of {num_layers}",
    }


def draft_states_of(draft_dir: Path, dtype: str) -> dict[str, str]:
    """The states of a drafter in the greeting. Raises ModelError."""
    files = draft_dir.glob("*.safetensors")
    return {"drafter": digest_of(draft_dir, files), "dtype": dtype}


def digest_of(model_dir: Path, weight_files: Iterable[Path]) -> str:
    """A digest of a model directory: of config.json, and of names, sizes, times and inodes of the
    weight files, which change with their content and are read at once. Raises ModelError.
    """
    digest = blake2b(digest_size=16)
    try:
        if (config := model_dir / CONFIG).exists():  # a GGUF file has none
            digest.update(config.read_bytes())
        for path in sorted(weight_files):
            status = path.stat()
            identity = (path.name, status.st_size, status.st_mtime_ns, status.st_ino)
            digest.update(repr(identity).encode())
    except OSError as error:
        raise ModelError(f"{model_dir}: cannot be read: {error}") from None
    return digest.hexdigest()
