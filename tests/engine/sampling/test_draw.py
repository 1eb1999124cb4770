"""A draw depends on its seed and position alone, and spreads evenly over both."""

from __future__ import annotations

import numpy as np

from luceasync.engine.sampling.draw import choice_seed, uniform


def test_uniform_is_splitmix64_from_the_seed():
    # The first outputs of the authors' generator for seed 1234567.
    outputs = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert [uniform(1234567, i) for i in range(3)] == [(x >> 11) / 2**53 for x in outputs]


def test_uniform_fills_the_unit_interval_for_neighbouring_seeds_and_positions():
    draws = np.array([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.bincount((draws.ravel() * 20).astype(int), minlength=20)
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]) < 0.04


def test_the_choices_of_one_request_have_different_seeds():
    assert choice_seed(7, 0) == 7
    assert len({choice_seed(seed, index) for seed in range(50) for index in range(8)}) == 400
