"""What both ends of a channel must agree on before a layer is loaded: weights, dtypes, layers.

Each end reads it for itself. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from blake3 import blake3

from luceasync.errors import ModelError
from luceasync.models.directory import CONFIG
from luceasync.models.files import ModelFiles
from luceasync.models.precision import Precision


def dtype_words(precision: Precision) -> str:
    """The dtypes of weights, computation, and keys and values, as the command line has them."""
    return f"{precision.weights}/{precision.compute}/{precision.kv}"


def states_of(model: ModelFiles, dtype: str, layers: str, weights: str = "") -> dict[str, str]:
    """The states of a stage in the greeting. `layers`: "begin:end"; `weights`: the digest of the
    model directory, if it is known: between machines that of ContentDigests. Raises ModelError.
    """
    weights = weights or digest_of(model.path, model.weights.paths)
    num_layers = model.spec.num_layers
    return {
        "weights": weights,
        "dtype": dtype,
        "layers": f"{layers} of {num_layers}",
    }


def draft_states_of(draft_dir: Path, dtype: str) -> dict[str, str]:
    """The states of a drafter in the greeting. Raises ModelError."""
    found = [draft_dir] if draft_dir.is_file() else draft_dir.glob("*")
    files = [path for path in found if path.suffix in (".safetensors", ".gguf")]
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


class ContentDigests:
    """Digests of the content of model directories, which are the same on every machine. A file is
    read once, and again if it has changed. Any thread may ask.
    """

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], str]] = {}

    def of(self, model_dir: Path, weight_files: Iterable[Path]) -> str:
        """The digest of config.json, and of names and content of the weight files. Raises
        ModelError.
        """
        digest = blake2b(digest_size=16)
        config = model_dir / CONFIG
        try:
            if config.exists():
                digest.update(config.read_bytes())
            for path in sorted(weight_files):
                digest.update(repr((path.name, self._of_file(path))).encode())
        except OSError as error:
            raise ModelError(f"{model_dir}: cannot be read: {error}") from None
        return digest.hexdigest()

    def _of_file(self, path: Path) -> str:
        status = path.stat()
        identity = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        known = self._known.get(path)
        if known is None or known[0] != identity:
            content = blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
            known = self._known[path] = identity, content
        return known[1]
