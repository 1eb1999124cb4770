"""Nested calls enter inference mode once."""

import pytest
import torch

from luceasync.models.inference import inference_mode


@inference_mode
def is_inference(x: torch.Tensor) -> bool:
    return (x + 1).is_inference()


@inference_mode
def outer(x: torch.Tensor) -> bool:
    return is_inference(x)


def test_what_is_made_inside_has_no_gradients_and_outside_nothing_has_changed() -> None:
    x = torch.zeros(1)
    assert outer(x) and is_inference(x) and not (x + 1).is_inference()


def test_an_inner_call_does_not_enter_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, enter = [], torch.inference_mode.__enter__

    def heard(self: torch.inference_mode) -> None:
        entered.append(self)
        enter(self)

    monkeypatch.setattr(torch.inference_mode, "__enter__", heard)
    assert outer(torch.zeros(1)) and len(entered) == 1
    outer(torch.zeros(1))
    assert len(entered) == 2


def test_a_failure_leaves_it_too() -> None:
    @inference_mode
    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert not torch.is_inference_mode_enabled()
