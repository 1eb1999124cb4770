"""The program that runs under two checkouts drives this one: its passes, and what both must say."""

import pytest
import torch
from against.passes import Passes, digest, wait

import luceasync.bench.small as small


def order(shape: str) -> dict:
    common = {"device": "cpu:0", "dtype": "fp32", "context": 130, "threads": 0}
    return common | {"config": dict(small.SMALL[shape])}


@pytest.mark.slow
def test_every_case_says_the_same_each_time_and_how_long_it_took() -> None:
    passes = Passes(order("qwen3_5"))
    for case, run in passes.cases.items():
        (first_s, first), (second_s, second) = run(), run()
        assert min(first_s, second_s) > 0
        assert first == second, case
    passes.close()


@pytest.mark.slow
def test_other_weights_say_something_else() -> None:
    said = []
    for shape in ("qwen3", "qwen3_5"):
        passes = Passes(order(shape))
        said.append([run()[1] for run in passes.cases.values()])
        passes.close()
    assert said[0] != said[1]


def test_where_there_is_no_ticket_it_asks_until_the_node_has_arrived() -> None:
    answers = [False, False, True]
    wait(None, lambda: answers.pop(0))
    assert answers == []


def test_a_ticket_is_waited_for_and_nothing_asked() -> None:
    class Ticket:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    ticket = Ticket()
    wait(ticket, lambda: 1 / 0 > 0)
    assert ticket.waited == 1


def test_digests_tell_logits_apart() -> None:

    assert digest(torch.ones(3)) == digest(torch.ones(3)) != digest(torch.tensor([1.0, 1.0, 1.1]))
