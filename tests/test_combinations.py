"""Few combinations of parameters cover all."""

from itertools import product

from tests.combinations import covering

ITEMS = [
    dict(zip(("family", "way", "place"), values, strict=True))
    for values in product("ab", "cd", "efgh")
]


def test_every_value_occurs():
    chosen = covering(ITEMS, 1)
    assert len(chosen) == 4
    assert {value for i in chosen for value in ITEMS[i].values()} == set("abcdefgh")


def test_every_two_values_meet():
    chosen = [ITEMS[i] for i in covering(ITEMS, 2)]
    for first, second in (("family", "way"), ("family", "place"), ("way", "place")):
        met = {(item[first], item[second]) for item in chosen}
        assert met == {(item[first], item[second]) for item in ITEMS}
    assert len(chosen) < len(ITEMS)


def test_what_never_meets_is_not_asked_for():
    assert covering([{"way": "c", "place": "e"}, {"way": "d", "place": "f"}], 2) == [0, 1]


def test_of_no_values_any_one_is_enough():
    assert covering(ITEMS, 0) == [0]
