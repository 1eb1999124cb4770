"""What has two names or two places in the two checkouts, by the first that is there."""

from __future__ import annotations

import importlib
from typing import Any

import luceasync


def either(*places: str) -> Any:
    """The first of "module:name" that there is."""
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(f"luceasync.{module}"), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"none of {', '.join(places)} in {luceasync.__file__}")


def pipeline(name: str, module: str) -> Any:
    return either(f"pipeline.{module}:{name}", f"target.{module}:{name}")
