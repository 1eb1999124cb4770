"""A GGUF model: one file, or all parts of a split one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.gguf.header import Header, Metadata, TensorHeader, read_header
from luceasync.gguf.paths import FileIdentity, identity_of, parts_of

SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """The headers of all parts. `metadata` is that of the first part; `tensors` are those of all
    parts, each with its file; `identities` are those of the files when they were read.
    """

    identities: dict[Path, FileIdentity | None]
    metadata: Metadata
    tensors: dict[str, tuple[Path, TensorHeader]]

    @property
    def paths(self) -> tuple[Path, ...]:
        """All parts, in order."""
        return tuple(self.identities)

    @property
    def path(self) -> Path:
        """The first part."""
        return self.paths[0]

    def has_changed(self) -> bool:
        """Whether a file has changed since its header was read."""
        return any(identity_of(path) != known for path, known in self.identities.items())

    @property
    def architecture(self) -> str:
        """The value of general.architecture. Raises ModelError."""
        return self.metadata.word("general.architecture")


def read_model(path: Path) -> GgufModel:
    """Read the headers of all parts of the file at `path`. Raises ModelError with its name."""
    paths = parts_of(path)
    headers = []
    for number, part in enumerate(paths):
        headers.append(read_header(part))
        try:
            _check_part(headers[-1], number, len(paths))
        except ModelError as error:
            raise ModelError(f"{part}: {error}") from None
    tensors: dict[str, tuple[Path, TensorHeader]] = {}
    for header in headers:
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise ModelError(f"{header.path}: the tensor {min(twice)!r} is in two parts")
        tensors |= {name: (header.path, tensor) for name, tensor in header.tensors.items()}
    metadata = headers[0].metadata
    try:
        expected = metadata.integer(SPLIT_TENSORS, len(tensors))
    except ModelError as error:
        raise ModelError(f"{paths[0]}: {error}") from None
    if expected != len(tensors):
        raise ModelError(f"{paths[0]}: its parts have {len(tensors)} tensors; expected {expected}")
    return GgufModel({header.path: header.identity for header in headers}, metadata, tensors)


def _check_part(header: Header, number: int, count: int) -> None:
    """Check that the header agrees with the part number and count in the file's name."""
    declared = header.metadata.integer(SPLIT_COUNT, 1)
    if max(declared, 1) != count:
        raise ModelError(
            f"a model of {declared} parts, but the file name says {count}; parts are named "
            "NAME-00001-of-00002.gguf"
        )
    place = header.metadata.integer(SPLIT_NUMBER, 0)
    if place != number:
        raise ModelError(f"{SPLIT_NUMBER} = {place}; expected {number} by the file name")
