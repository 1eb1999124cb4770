"""Two checkouts' servers are asked for the same thing."""

from __future__ import annotations

from pathlib import Path

from luceasync.bench.serve_beside import model_of
from luceasync.config import BUNDLED_MODEL_DIR

ROOT = Path(__file__).parents[2]


def test_another_checkout_serves_its_own_bundled_model_with_the_drafter_beside_it() -> None:
    assert model_of(ROOT, BUNDLED_MODEL_DIR) == BUNDLED_MODEL_DIR
    there = model_of(Path("/other"), BUNDLED_MODEL_DIR)
    assert there.relative_to("/other") == BUNDLED_MODEL_DIR.relative_to(ROOT)
    assert model_of(None, BUNDLED_MODEL_DIR) == BUNDLED_MODEL_DIR
    assert model_of(Path("/other"), Path("/models/m")) == Path("/models/m")
