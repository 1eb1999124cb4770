"""Backends over tiny models, as in the tests of the target."""

from __future__ import annotations

from tests.pipeline.conftest import make_backend

__all__ = ["make_backend"]
