"""A model in GGUF: one file, or the parts of one that is split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from luceasync.errors import ModelError
from luceasync.gguf.header import Header, Metadata, TensorEntry, read_header
from luceasync.gguf.paths import FileIdentity, identity_of, parts_of

SPLIT_NUMBER, SPLIT_COUNT, SPLIT_TENSORS = "split.no", "split.count", "split.tensors.count"


@dataclass(frozen=True, slots=True)
class GgufModel:
    """`metadata` is the first part's. `tensors`: of all parts, each with the file that it is in."""

    identities: dict[Path, FileIdentity | None]
    metadata: Metadata
    tensors: dict[str, tuple[Path, TensorEntry]]

    @property
    def paths(self) -> tuple[Path, ...]:
        """All parts, in order."""
        return tuple(self.identities)

    @property
    def path(self) -> Path:
        """The first part."""
        return self.paths[0]

    def has_changed(self) -> bool:
        """Whether a file is not the one any more whose header was read."""
        return any(identity_of(path) != known for path, known in self.identities.items())

    @property
    def architecture(self) -> str:
        """As the file calls it. Raises ModelError."""
        return self.metadata.word("general.architecture")


def read_model(path: Path) -> GgufModel:
    """The headers of the file at `path` and of all its parts. Raises ModelError naming the file."""
    paths = parts_of(path)
    headers = []
    for number, part in enumerate(paths):
        headers.append(read_header(part))
        try:
            _check_part(headers[-1], number, len(paths))
        except ModelError as error:
            raise ModelError(f"{part}: {error}") from None
    tensors: dict[str, tuple[Path, TensorEntry]] = {}
    for header in headers:
        twice = tensors.keys() & header.tensors.keys()
        if twice:
            raise ModelError(f"{header.path}: the tensor {min(twice)!r} is in another part too")
        tensors |= {name: (header.path, tensor) for name, tensor in header.tensors.items()}
    metadata = headers[0].metadata
    try:
        expected = metadata.integer(SPLIT_TENSORS, len(tensors))
    except ModelError as error:
        raise ModelError(f"{paths[0]}: {error}") from None
    if expected != len(tensors):
        raise ModelError(f"{paths[0]}: its parts have {len(tensors)} tensors, not {expected}")
    return GgufModel({header.path: header.identity for header in headers}, metadata, tensors)


def _check_part(header: Header, number: int, count: int) -> None:
    """Whether the header says what the file's name does."""
    said = header.metadata.integer(SPLIT_COUNT, 1)
    if max(said, 1) != count:
        raise ModelError(
            f"a file of {said} parts, and its name says {count}; parts are named "
            "NAME-00001-of-00002.gguf"
        )
    place = header.metadata.integer(SPLIT_NUMBER, 0)
    if place != number:
        raise ModelError(f"{SPLIT_NUMBER} = {place}; {number} is expected in a file of this name")
