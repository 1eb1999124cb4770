"""The operations of luceasync.models.trees on GPUs, as fused kernels."""

from __future__ import annotations

from torch import Tensor

from luceasync.kernels import commit as commit_kernels
from luceasync.kernels import trees as tree_kernels
from luceasync.kernels.tree_attention import attend_tree
from luceasync.kernels.tree_delta import delta_tree
from luceasync.models.ops import AttentionNorms, DeltaParameters
from luceasync.models.pass_rows import Paths, Rows
from luceasync.models.scratch import AttentionScratch, DeltaScratch
from luceasync.models.spec import AttentionSpec, DeltaSpec
from luceasync.models.trees import Trees


class TritonTrees:
    """The operations of TorchTrees, which says what each means. All can be captured as a CUDA graph
    and read `rows` and `paths` from the device alone.
    """

    def trees(self, parents: Tensor, reach: int) -> Trees:
        return Trees(*tree_kernels.trees(parents, reach))

    def attend(
        self,
        projected: Tensor,
        spec: AttentionSpec,
        norms: AttentionNorms,
        keys: Tensor,
        values: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: AttentionScratch,
    ) -> Tensor:
        return attend_tree(
            projected,
            (norms.query, norms.key, norms.eps),
            keys,
            values,
            rows.lanes,
            rows.positions,
            rows.tables,
            (rows.cos, rows.sin),
            trees.ancestors,
            (scratch.keys, scratch.values),
            num_heads=spec.num_heads,
            rotary_dim=spec.rotary_dim,
            gated=spec.gated,
        )

    def delta(
        self,
        projected: Tensor,
        spec: DeltaSpec,
        parameters: DeltaParameters,
        conv_state: Tensor,
        delta_state: Tensor,
        rows: Rows,
        trees: Trees,
        scratch: DeltaScratch,
    ) -> Tensor:
        small = (parameters.conv, parameters.decay_rate, parameters.dt_bias, parameters.norm)
        return delta_tree(
            projected,
            *small,
            parameters.eps,
            conv_state,
            delta_state,
            rows.lanes,
            trees.ancestors,
            trees.taps,
            scratch.tensors,
            num_key_heads=spec.num_key_heads,
        )

    def commit_attention(
        self, scratch: AttentionScratch, keys: Tensor, values: Tensor, paths: Paths
    ) -> None:
        new = (scratch.keys, scratch.values)
        path = (paths.lanes, paths.begins, paths.rows, paths.counts, paths.tables)
        commit_kernels.commit_attention(new, keys, values, *path)

    def commit_delta(
        self, scratch: DeltaScratch, conv_state: Tensor, delta_state: Tensor, paths: Paths
    ) -> None:
        states = (conv_state, delta_state)
        path = (paths.lanes, paths.rows, paths.counts)
        commit_kernels.commit_delta(scratch.tensors, *states, *path)
