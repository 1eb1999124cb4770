"""Greedy answers of a frozen target, many at once, with keys and values in lanes.

A lane that is done takes the next prompt, so that a step is full whatever the lengths of answers.
For targets all of whose layers are attention.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.models.mixers.attention import AttentionSpec
from luceasync.models.mixers.attention_sizes import HeadNorms
from luceasync.models.mixers.attention_torch import TorchAttention, gated, heads_of
from luceasync.models.mixers.mixer import Mixer, State
from training.draft.target import FrozenTarget

PROMPT_TOKENS = 32768  # at a time, padding included
STEPS = 16  # between two looks at what is done
LENGTH_STEP = 64  # of prompts and of what steps read

Answered = tuple[Sequence[int], list[int]]  # a prompt and its answer, including the end mark


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of lanes: prompts from their beginning, or one row of every lane. `prepared` as in
    luceasync.models.pass_rows.Rows; `positions` int64 [lanes, rows]; steps read `span` places.
    """

    prepared: dict[Mixer, Any]
    lanes: Tensor
    positions: Tensor
    span: int


class _LaneAttention(TorchAttention):
    """TorchAttention over lanes; the state is [lanes, kv_heads, tokens, head_dim] twice."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.spec = spec

    def attend(self, projected: Tensor, norms: HeadNorms, state: State, rows: _Rows) -> Tensor:
        q, k, v, gates = heads_of(projected, self.spec, norms, rows.prepared[self.spec])
        keys, values = state
        keys[rows.lanes[:, None], :, rows.positions] = k
        values[rows.lanes[:, None], :, rows.positions] = v
        if q.shape[1] > 1:
            heads = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            return gated(out.transpose(1, 2).flatten(2), gates)
        grouped = q[:, 0].unflatten(1, (self.spec.num_kv_heads, -1)) * self.spec.head_dim**-0.5
        scores = grouped @ keys[:, :, : rows.span].transpose(-1, -2)
        seen = torch.arange(rows.span, device=q.device) <= rows.positions
        scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
        shares = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
        return gated((shares @ values[:, :, : rows.span]).flatten(1)[:, None], gates)


class Lanes:
    """Room for `num_lanes` texts of at most `row_tokens` tokens. Raises SystemExit for a target
    with layers other than attention.
    """

    def __init__(self, target: FrozenTarget, num_lanes: int, row_tokens: int) -> None:
        if other := {*map(type, target.spec.mixers)} - {AttentionSpec}:
            names = ", ".join(sorted(kind.__name__ for kind in other))
            raise SystemExit(f"--model: layers of attention alone are expected, it has {names}")
        self._target = target
        self._row_tokens = row_tokens
        self._bodies = {mixer: _LaneAttention(mixer) for mixer in target.spec.mixers}
        self._layers = [
            replace(layer, mixer=replace(layer.mixer, body=self._bodies[mixer]))
            for layer, mixer in zip(target.layers, target.spec.mixers, strict=True)
        ]
        place = {"device": target.device, "dtype": target.dtype}
        self._states = [
            tuple(
                torch.zeros(num_lanes, m.num_kv_heads, row_tokens, m.head_dim, **place)
                for _ in range(2)
            )
            for m in target.spec.mixers
        ]
        size = {"dtype": torch.int64, "device": target.device}
        self._ids = torch.zeros(num_lanes, row_tokens, **size)
        self._ends = torch.ones(num_lanes, **size)  # of what each lane's text has so far
        self._limits = torch.ones(num_lanes, **size)
        self._open = torch.zeros(num_lanes, dtype=torch.bool, device=target.device)
        self._stops = torch.tensor(sorted(target.spec.eos_ids), **size)
        self._all = torch.arange(num_lanes, **size)
        self._prompts: list[Sequence[int] | None] = [None] * num_lanes

    def answers(
        self, prompts: Iterable[Sequence[int]], max_tokens: int, seconds: float
    ) -> Iterator[Answered]:
        """Answers to the prompts in the order in which they end, each of at most `max_tokens`
        tokens; after `seconds`, those under way as far as they are.
        """
        end_at, left = time.monotonic() + seconds, iter(prompts)
        while True:
            yield from self._done(self._open.tolist())
            free = [lane for lane, prompt in enumerate(self._prompts) if prompt is None]
            if len(free) >= len(self._prompts) / 8:  # prompts in large batches
                self._begin([*zip(free, left)], max_tokens)  # noqa: B905
            if not any(self._prompts):
                return
            self._run_steps()
            if time.monotonic() > end_at:
                yield from self._done([False] * len(self._prompts))
                return

    def _done(self, is_open: Sequence[bool]) -> Iterator[Answered]:
        """The answers of lanes that are not open, which are free then."""
        done = [i for i, text in enumerate(self._prompts) if text is not None and not is_open[i]]
        if not done:
            return
        texts, ends = self._ids[done].tolist(), self._ends[done].tolist()
        for lane, text, end in zip(done, texts, ends, strict=True):
            prompt, self._prompts[lane] = self._prompts[lane], None
            if prompt is not None and end > len(prompt):
                yield prompt, text[len(prompt) : end]

    def _begin(self, taken: Sequence[tuple[int, Sequence[int]]], max_tokens: int) -> None:
        """Run the prompts of lanes, longest first, and choose their first tokens."""
        order = sorted(taken, key=lambda pair: len(pair[1]))
        while order:
            length = -(-len(order[-1][1]) // LENGTH_STEP) * LENGTH_STEP
            length = min(length, self._row_tokens)
            count = max(1, PROMPT_TOKENS // length)
            members, order = order[-count:], order[:-count]
            ids = torch.zeros(len(members), length, dtype=torch.int64)
            for row, (lane, prompt) in enumerate(members):
                ids[row, : len(prompt)] = torch.tensor(prompt)
                self._prompts[lane] = prompt
            lanes = torch.tensor([lane for lane, _ in members], device=ids.device)
            ends = torch.tensor([len(prompt) for _, prompt in members])
            ids, lanes, ends = (x.to(self._all.device) for x in (ids, lanes, ends))
            positions = torch.arange(length, device=ids.device).expand(len(members), -1)
            self._ids[lanes, :length], self._ends[lanes], self._open[lanes] = ids, ends, True
            self._limits[lanes] = (ends + max_tokens).clamp(max=self._row_tokens)
            rows = self._run(ids, lanes, positions, length)
            last = rows[torch.arange(len(members), device=ids.device), ends - 1]
            self._take(lanes, last)

    @torch.inference_mode()
    def _run_steps(self) -> None:
        longest = int(self._ends.max()) + STEPS
        span = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self._row_tokens)
        for _ in range(STEPS):
            newest = (self._ends - 1)[:, None]
            rows = self._run(self._ids.gather(1, newest), self._all, newest, span)
            self._take(self._all, rows[:, 0])

    @torch.inference_mode()
    def _run(self, ids: Tensor, lanes: Tensor, positions: Tensor, span: int) -> Tensor:
        """Rows for the head: [lanes, rows, hidden]."""
        prepared = {mixer: body.prepare(positions) for mixer, body in self._bodies.items()}
        rows = _Rows(prepared, lanes, positions, span)
        x = F.embedding(ids, self._target.embedding)
        for layer, state in zip(self._layers, self._states, strict=True):
            x = layer.forward(x, state, rows)
        return self._target.norm(x)

    @torch.inference_mode()
    def _take(self, lanes: Tensor, rows: Tensor) -> None:
        """Add the most probable token behind `rows` [lanes, hidden] to the lanes that are open."""
        token = F.linear(rows, self._target.head).argmax(-1)
        is_open, ends = self._open[lanes], self._ends[lanes]
        at = ends.clamp(max=self._row_tokens - 1)
        self._ids[lanes, at] = torch.where(is_open, token, self._ids[lanes, at])
        self._ends[lanes] = ends = ends + is_open
        self._open[lanes] = is_open & ~torch.isin(token, self._stops) & (ends < self._limits[lanes])
