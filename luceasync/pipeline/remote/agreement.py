"""What this process and a backend's must agree on before a layer is loaded, in words.

Each end reads it for itself. Pure of torch.
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
    """Of weights, computation, and keys and values."""
    return f"{precision.weights}/{precision.compute}/{precision.kv}"


def states_of(model: ModelFiles, dtype: str, layers: str) -> dict[str, str]:
    """What one end states of a stage. `layers`: its "begin:end". Raises ModelError."""
    weights = digest_of(model.path, model.weights.paths)
    num_layers = model.spec.num_layers
    return {
        "weights": weights,
        "dtype": dtype,
        "layers": f"{layers} of {num_layers}",
    }


def draft_states_of(draft_dir: Path, dtype: str) -> dict[str, str]:
    """What one end states of a drafter. Raises ModelError."""
    files = draft_dir.glob("*.safetensors")
    return {"drafter": digest_of(draft_dir, files), "dtype": dtype}


def digest_of(model_dir: Path, weight_files: Iterable[Path]) -> str:
    """Of a directory. Weights are told by what changes with their content on one machine, which is
    read at once: names, sizes, times and inodes of the files; and by the digest of config.json.
    Raises ModelError.
    """
    digest = blake2b(digest_size=16)
    try:
        if (config := model_dir / CONFIG).exists():  # a GGUF file says it all itself
            digest.update(config.read_bytes())
        for path in sorted(weight_files):
            status = path.stat()
            told = (path.name, status.st_size, status.st_mtime_ns, status.st_ino)
            digest.update(repr(told).encode())
    except OSError as error:
        raise ModelError(f"{model_dir}: cannot be read: {error}") from None
    return digest.hexdigest()
