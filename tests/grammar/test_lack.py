"""A lack is much once two rounds of three have shown it, and for some rounds after the last."""

from __future__ import annotations

from luceasync.grammar.matcher import LITTLE, MOST, Lack


def after(rounds: str) -> Lack:
    """`x` is a round that has shown it, `.` one that has not; the first one is behind it."""
    lack = Lack()
    for sign in f".{rounds}":
        lack.end_round()
        if sign == "x":
            lack.show()
    return lack


def test_the_first_round_is_looked_into_and_the_second_not():
    assert Lack().is_much
    assert not after("").is_much


def test_it_takes_two_rounds_of_three():
    assert after("...xx").is_much
    assert after("...x.x").is_much
    assert not after("...x..").is_much
    assert not after("...x...x").is_much


def test_it_is_forgotten_some_rounds_after_the_last():
    shown = "x" * 9
    assert after(shown).is_much
    num_rounds = MOST - LITTLE
    assert after(shown + "." * (num_rounds - 1)).is_much
    assert not after(shown + "." * num_rounds).is_much


def test_another_form_is_looked_into_once():
    lack = after("......")
    lack.begin()
    assert lack.is_much
    lack.end_round()
    assert not lack.is_much
