"""Gated DeltaNet on GPUs: fused Triton kernels, all of which CUDA graphs can capture."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from luceasync.kernels.commit import commit_delta
from luceasync.kernels.delta import delta_step
from luceasync.kernels.delta_chunks import delta_rows
from luceasync.kernels.tree_delta import delta_tree
from luceasync.models.mixers.delta_sizes import DeltaParameters, DeltaSizes
from luceasync.models.mixers.mixer import State
from luceasync.models.pass_rows import NO_LANE, Paths, Rows
from luceasync.models.trees import Trees


class TritonDelta:
    """Gated DeltaNet as fused kernels; TorchDelta documents the methods."""

    def __init__(self, spec: DeltaSizes) -> None:
        self._spec = spec

    def prepare(self, positions: Tensor) -> None:
        """No-op: nothing depends on positions."""

    def delta(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor:
        state = (conv_state, delta_state, rows.lanes)
        arguments = (*_small(parameters), *state)
        key_heads = self._spec.num_key_heads
        if rows.mark is not None:
            return self._in_parts(rows.mark, projected, parameters, conv_state, delta_state, rows)
        if projected.shape[1] == 1:
            return delta_step(projected[:, 0], *arguments, num_key_heads=key_heads)[:, None]
        return delta_rows(projected, *arguments, num_key_heads=key_heads)

    def _in_parts(
        self,
        mark: int,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
    ) -> Tensor:
        """Run a chunk with a mark as two chunks, copying the states in between."""
        (entry,), parts = rows.entries, projected.tensor_split([mark], 1)
        plain = replace(rows, mark=None)
        before = self.delta(parts[0], parameters, conv_state, delta_state, plain)
        for state in (conv_state, delta_state):
            state[NO_LANE] = state[entry.lane]
        after = self.delta(parts[1], parameters, conv_state, delta_state, plain)
        return torch.cat([before, after], 1)

    def delta_tree(
        self,
        projected: Tensor,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: State,
    ) -> Tensor:
        inputs, keys, updates, totals = scratch
        return delta_tree(
            projected,
            *_small(parameters),
            conv_state,
            delta_state,
            rows.lanes,
            trees.ancestors,
            trees.taps,
            (inputs, keys, updates, totals),
            num_key_heads=self._spec.num_key_heads,
        )

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        inputs, keys, updates, totals = scratch
        conv_state, delta_state = state
        path = (paths.lanes, paths.rows, paths.counts)
        commit_delta((inputs, keys, updates, totals), conv_state, delta_state, *path)


def _small(parameters: DeltaParameters) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    small = (parameters.conv, parameters.decay_rate, parameters.dt_bias, parameters.norm)
    return (*small, parameters.eps)
