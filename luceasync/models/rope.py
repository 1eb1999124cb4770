"""Rotary position embedding (Su et al., 2021) as data: the angle by which each pair of a head's
dimensions turns per position.

Frequencies are computed on the CPU, in float32 and in the same order of operations as in
transformers: one unit in the last place is 0.006 rad at position 100,000. Does not import torch at
its top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Rope(Protocol):
    """One way to choose frequencies. Each is a frozen dataclass, whose `kind` identifies it in
    digests."""

    @property
    def kind(self) -> str: ...

    @property
    def magnitude(self) -> float:
        """The factor of cosines and sines."""
        ...

    def frequencies(self, theta: float, dim: int) -> Tensor:
        """float32 [dim / 2], for `dim` rotated dimensions of a head."""
        ...


@dataclass(frozen=True, slots=True)
class PlainRope:
    """1 / theta^(2i / dim)."""

    kind: str = field(default="default", init=False)
    magnitude: float = field(default=1.0, init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        return 1.0 / _powers(theta, dim, dim)


PLAIN = PlainRope()


@dataclass(frozen=True, slots=True)
class NoRope:
    """No rotation: layers without position embedding."""

    kind: str = field(default="none", init=False)
    magnitude: float = field(default=1.0, init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        import torch

        return torch.zeros(dim // 2)


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    factor: float
    kind: str = field(default="linear", init=False)
    magnitude: float = field(default=1.0, init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        return (1.0 / _powers(theta, dim, dim)) / self.factor


@dataclass(frozen=True, slots=True)
class DividedRope:
    """Each frequency divided by its own number, as GGUF files store scaled ropes."""

    divisors: tuple[float, ...]
    kind: str = field(default="divided", init=False)
    magnitude: float = field(default=1.0, init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        import torch

        return (1.0 / _powers(theta, dim, dim)) / torch.tensor(self.divisors)


@dataclass(frozen=True, slots=True)
class ProportionalRope:
    """The first `share` of the pairs are rotated as if the whole head were; the others are not."""

    share: float
    factor: float
    kind: str = field(default="proportional", init=False)
    magnitude: float = field(default=1.0, init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        import torch

        num_turned = int(self.share * dim // 2)
        turned = 1.0 / _powers(theta, 2 * num_turned, dim)
        return torch.cat([turned, torch.zeros(dim // 2 - num_turned)]) / self.factor


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long waves divided by `factor`, short ones kept, and those between interpolated: a wave is
    long that fits `original_positions` fewer than `low` times, and short if more than `high` times.
    """

    factor: float
    low: float
    high: float
    original_positions: int
    kind: str = field(default="llama3", init=False)
    magnitude: float = field(default=1.0, init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        import torch

        plain = 1.0 / _powers(theta, dim, dim)
        waves = 2 * math.pi / plain
        is_long = waves > self.original_positions / self.low
        is_short = waves < self.original_positions / self.high
        share = (self.original_positions / waves - self.low) / (self.high - self.low)
        between = (1 - share) * plain / self.factor + share * plain
        scaled = torch.where(is_long, plain / self.factor, plain)
        return torch.where(is_long | is_short, scaled, between)


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al., 2023): dimensions that turn more than `beta_fast` times within
    `original_positions` keep their frequency, those below `beta_slow` have it divided by `factor`,
    and a ramp joins them. `rounds`: its ends are whole dimensions.
    """

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    magnitude: float
    rounds: bool
    kind: str = field(default="yarn", init=False)

    def frequencies(self, theta: float, dim: int) -> Tensor:
        import torch

        powers = _powers(theta, dim, dim)
        begin, end = (self._turning(beta, theta, dim) for beta in (self.beta_fast, self.beta_slow))
        if self.rounds:
            begin, end = math.floor(begin), math.ceil(end)
        begin, end = max(begin, 0), min(end, dim - 1)
        end += 0.001 if begin == end else 0
        ramp = ((torch.arange(dim // 2, dtype=torch.float32) - begin) / (end - begin)).clamp(0, 1)
        kept = 1 - ramp
        return (1.0 / (self.factor * powers)) * (1 - kept) + (1.0 / powers) * kept

    def _turning(self, num_turns: float, theta: float, dim: int) -> float:
        """The dimension that turns `num_turns` times within the original positions."""
        wave = self.original_positions / (num_turns * 2 * math.pi)
        return (dim * math.log(wave)) / (2 * math.log(theta))


def yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    """YaRN's magnitude for a context `factor` times as long: 0.1 scale ln(factor) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _powers(theta: float, num: int, dim: int) -> Tensor:
    """theta^(0 / dim), theta^(2 / dim), ... for the first `num` dimensions: float32 [num / 2]."""
    import torch

    powers: Tensor = theta ** (torch.arange(0, num, 2).float() / dim)
    return powers
