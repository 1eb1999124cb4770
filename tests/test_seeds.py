"""Random numbers without a seed of their own are the same whenever and wherever a test is run."""

from __future__ import annotations

import os
import random
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

Draws = tuple[float, float, float]


def drawn() -> Draws:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def first_of(name: str) -> Draws:
    seed = zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)
    of_torch = float(torch.rand((), generator=generator))
    return random.Random(seed).random(), float(np.random.RandomState(seed).rand()), of_torch


@pytest.fixture(scope="module")
def shared() -> Draws:
    return drawn()


def test_a_fixture_that_tests_share_has_its_own_and_changes_theirs_in_nothing(
    shared: Draws,
) -> None:
    assert shared == first_of("tests/test_seeds.py shared 0")
    assert drawn() == first_of(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])


def test_a_test_begins_with_the_numbers_of_its_name() -> None:
    name = "tests/test_seeds.py::test_a_test_begins_with_the_numbers_of_its_name"
    assert drawn() == first_of(name)


def test_each_example_begins_with_the_same() -> None:
    found = set()

    @settings(max_examples=5, database=None)
    @given(st.integers())
    def draw(number: int) -> None:
        found.add(drawn())

    draw()
    assert len(found) == 1
