"""A format whose weights nobody has stored: every process draws its own layers, which are the same
in all of them. For splits of models that are not at hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from luceasync.bench.shapes import Shape
from luceasync.models import formats
from luceasync.models.forms import Dense, Form
from luceasync.models.forms import Shape as TensorShape
from luceasync.models.loader import RandomSource, TensorSource
from luceasync.models.precision import Dtype, torch_dtype
from luceasync.pipeline.devices import default_device
from luceasync.pipeline.platform import open_platform

MARK = "random.json"  # the dtype of the weights, in a model's directory


class RandomFormat:
    """See luceasync.models.formats.Format."""

    def is_at(self, model_dir: Path) -> bool:
        return (model_dir / MARK).exists()

    def weight_files(self, model_dir: Path) -> list[Path]:
        return [model_dir / MARK]

    def forms(self, model_dir: Path) -> Callable[[str], Form]:
        return lambda name: Dense()

    def check(self, model_dir: Path, shapes: Mapping[str, TensorShape]) -> None:
        """All of them are made when they are asked for."""

    @contextmanager
    def open(self, model_dir: Path) -> Iterator[TensorSource]:
        dtype = json.loads((model_dir / MARK).read_text(encoding="utf-8"))
        device = open_platform(default_device()).device
        yield RandomSource(torch_dtype(dtype), device)


def write_model(model_dir: Path, shape: Shape, dtype: Dtype) -> None:
    """A directory that is a model of random weights, to processes that know the format."""
    (model_dir / "config.json").write_text(json.dumps(dict(shape)), encoding="utf-8")
    (model_dir / MARK).write_text(json.dumps(dtype), encoding="utf-8")


def know_it() -> None:
    """Let this process read such models."""
    formats.FORMATS.insert(0, RandomFormat())
