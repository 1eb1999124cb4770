"""Row operations before and after experts: what each row is routed by, and the sum of its results.

None reads another row, so a row's bits do not depend on others.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from luceasync.kernels.kernel import kernel
from luceasync.kernels.overlap import overlap_options, start_next, wait_for_inputs
from luceasync.kernels.quant_gemv_step import nothing

BLOCK = 1024  # columns at a time
SCORED_ROWS, SCORED_EXPERTS = 4, 2  # of a program
SUMMED_ROWS = 4  # of a program that adds parts of scores
ALIGNED_ROWS = 8  # for products whose rows are aligned: others take four times as long


def scores(
    x: Tensor, norm: tuple[Tensor, float], router: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The rows normed, the router's float32 logits, a counter for `choose`, and a sigmoid for each
    row if there is a `gate`.

    x: [rows, dim]; norm: float32 [dim] and its epsilon; router: float32 [experts, dim]; gate:
    float32 [1, dim]. -> [rows, dim], [rows, experts], int32 [1], float32 [rows].
    """
    (num_rows, dim), num_experts = x.shape, len(router)
    normed = x.new_empty(x.shape)
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    gates = None if gate is None else logits.new_empty(num_rows)
    arrivals = torch.empty(1, dtype=torch.int32, device=x.device)
    num_matrices = num_experts + (gate is not None)
    grid = (triton.cdiv(num_matrices, SCORED_EXPERTS), triton.cdiv(num_rows, SCORED_ROWS))
    _scores_kernel[grid](
        x.contiguous(),
        norm[0],
        router,
        gate,
        normed,
        logits,
        gates,
        arrivals,
        num_rows,
        num_experts,
        norm[1],
        DIM=dim,
        BLOCK=min(BLOCK, triton.next_power_of_2(dim)),
        ROWS=SCORED_ROWS,
        EXPERTS=SCORED_EXPERTS,
        num_warps=4,
        **overlap_options(x),
    )
    return normed, logits, arrivals, gates


@kernel(do_not_specialize=["num_rows"])
def _scores_kernel(
    x,
    norm,
    router,
    gate,
    normed,
    logits,
    gates,
    arrivals,
    num_rows,
    num_experts,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_ok = (row < num_rows)[:, None]
    column = tl.arange(0, BLOCK)
    weights, factors = nothing(), nothing()
    for begin in tl.static_range(0, DIM, BLOCK):
        at = begin + column
        ok = (at < DIM)[None, :]
        w = tl.load(
            router + expert[:, None] * DIM + at[None, :],
            mask=ok & (expert < num_experts)[:, None],
            other=0.0,
        )
        if gate is not None:
            own = tl.load(
                gate + at[None, :] + expert[:, None] * 0,
                mask=ok & (expert == num_experts)[:, None],
                other=0.0,
            )
            w = w + own
        weights += (w,)
        factors += (tl.load(norm + at, mask=at < DIM, other=0.0),)
    wait_for_inputs(OVERLAP)
    start_next(OVERLAP)

    squares = tl.zeros([ROWS, BLOCK], tl.float32)
    for begin in tl.static_range(0, DIM, BLOCK):
        at = (begin + column)[None, :]
        part = tl.load(x + row[:, None] * DIM + at, mask=row_ok & (at < DIM), other=0.0)
        squares += part.to(tl.float32) * part.to(tl.float32)
    rate = tl.rsqrt(tl.sum(squares, 1) / DIM + eps)[:, None]
    total = tl.zeros([EXPERTS, ROWS, BLOCK], tl.float32)
    is_first = tl.program_id(0) == 0
    for begin in tl.static_range(0, DIM, BLOCK):
        at = (begin + column)[None, :]
        ok = row_ok & (at < DIM)
        part = tl.load(x + row[:, None] * DIM + at, mask=ok, other=0.0).to(tl.float32)
        part = (part * rate * factors[begin // BLOCK][None, :]).to(normed.dtype.element_ty)
        tl.store(normed + row[:, None] * DIM + at, part, mask=ok & is_first)
        total += weights[begin // BLOCK][:, None, :] * part.to(tl.float32)[None, :, :]
    found = tl.sum(total, 2)  # [EXPERTS, ROWS]
    is_row = (row < num_rows)[None, :]
    place = row[None, :] * num_experts + expert[:, None]
    tl.store(logits + place, found, mask=is_row & (expert < num_experts)[:, None])
    if gate is not None:
        is_gate = is_row & (expert == num_experts)[:, None]
        tl.store(gates + row[None, :] + expert[:, None] * 0, tl.sigmoid(found), mask=is_gate)
    if is_first & (tl.program_id(1) == 0):
        tl.store(arrivals, 0)


def scores_of_many(
    normed: Tensor, router: Tensor, gate: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The router's logits and the sigmoids of any number of normed rows, as `scores` has them.

    A float32 number is the sum of three bfloat16 numbers; a tensor core computes their products
    with rows of bfloat16 and adds them in float32.
    """
    if normed.dtype != torch.bfloat16 or not normed.is_cuda or torch.version.hip is not None:
        exact = normed.float()
        gates = None if gate is None else F.linear(exact, gate)[:, 0].sigmoid()
        return F.linear(exact, router), gates
    parts = parts_of(router, gate)
    products = torch.mm(normed, parts.view(-1, parts.shape[2]).t(), out_dtype=torch.float32)
    return sums_of_parts(products, len(router), has_gate=gate is not None)


def parts_of(router: Tensor, gate: Tensor | None) -> Tensor:
    """bfloat16 numbers whose sums over three are those of the router and the gate: [3, matrices,
    dim], with rows of zeros up to a multiple of ALIGNED_ROWS.
    """
    num_experts, dim = router.shape
    num_matrices = num_experts + (gate is not None)
    width = triton.cdiv(num_matrices, ALIGNED_ROWS) * ALIGNED_ROWS
    parts = router.new_empty(3, width, dim, dtype=torch.bfloat16)
    _parts_kernel.launch(
        (triton.cdiv(dim, BLOCK), width, 1),
        router,
        gate,
        parts,
        num_experts,
        num_matrices,
        width,
        dim,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return parts


@kernel()
def _parts_kernel(router, gate, parts, num_experts, num_matrices, width, dim, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = column < dim
    rest = tl.load(router + row * dim + column, mask=ok & (row < num_experts), other=0.0)
    if gate is not None:
        is_gate = (row >= num_experts) & (row < num_matrices)
        rest += tl.load(gate + column, mask=ok & is_gate, other=0.0)
    for i in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        tl.store(parts + (i * width + row) * dim + column, part, mask=ok)
        rest -= part.to(tl.float32)


def sums_of_parts(
    products: Tensor, num_experts: int, *, has_gate: bool
) -> tuple[Tensor, Tensor | None]:
    """Logits and sigmoids of products with `parts_of`, float32 [rows, 3 * matrices]."""
    num_rows, width = len(products), products.shape[1] // 3
    logits = products.new_empty(num_rows, num_experts)
    gates = products.new_empty(num_rows) if has_gate else None
    _sums_kernel.launch(
        (triton.cdiv(num_rows, SUMMED_ROWS), 1, 1),
        products,
        logits,
        gates,
        num_rows,
        num_experts,
        width,
        ROWS=SUMMED_ROWS,
        WIDTH=triton.next_power_of_2(width),
        num_warps=4,
    )
    return logits, gates


@kernel(do_not_specialize=["num_rows"])
def _sums_kernel(
    products,
    logits,
    gates,
    num_rows,
    num_experts,
    width,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    matrix = tl.arange(0, WIDTH)[None, :]
    at = products + row.to(tl.int64) * (3 * width) + matrix
    ok = (row < num_rows) & (matrix < width)
    total = tl.load(at, mask=ok, other=0.0)
    for i in tl.static_range(1, 3):
        total += tl.load(at + i * width, mask=ok, other=0.0)
    tl.store(logits + row * num_experts + matrix, total, mask=ok & (matrix < num_experts))
    if gates is not None:
        is_gate = ok & (matrix == num_experts)
        tl.store(gates + row + matrix * 0, tl.sigmoid(total), mask=is_gate)


def add_weighted(
    results: Tensor,
    weights: Tensor,
    places: Tensor,
    base: Tensor,
    shared: Tensor | None = None,
    gates: Tensor | None = None,
    *,
    is_chosen: bool = False,
) -> Tensor:
    """base + the sum of each row's results by its weights + its result of a shared expert, rounded
    once.

    results: [places, dim]; weights, places: [n, k]; base: [n, dim]; shared: [n, dim], which is
    multiplied by `gates`, float32 [n]. `is_chosen`: the launch before this one has waited for all
    but `results` and `shared`, so the rest is loaded while it runs.
    """
    (num_rows, num_chosen), dim = places.shape, base.shape[1]
    base, out = base.contiguous(), base.new_empty(base.shape)
    results = results.contiguous()
    _add_weighted_kernel.launch(
        (triton.cdiv(dim, BLOCK), num_rows, 1),
        results,
        weights,
        places,
        base,
        shared,
        gates,
        out,
        dim,
        NUM_CHOSEN=num_chosen,
        BLOCK=BLOCK,
        CHOSEN=is_chosen,
        num_warps=4,
        **overlap_options(base),
    )
    return out


@kernel()
def _add_weighted_kernel(
    results,
    weights,
    places,
    base,
    shared,
    gates,
    out,
    dim,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    start_next(OVERLAP)
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = column < dim
    if not CHOSEN:
        wait_for_inputs(OVERLAP)
    total = tl.load(base + row * dim + column, mask=ok, other=0.0, cache_modifier=".cg")
    total = total.to(tl.float32)
    at_result, factors = nothing(), nothing()
    for j in tl.static_range(NUM_CHOSEN):
        place = tl.load(places + row * NUM_CHOSEN + j, cache_modifier=".cg").to(tl.int64)
        at_result += (results + place * dim + column,)
        factors += (tl.load(weights + row * NUM_CHOSEN + j, cache_modifier=".cg"),)
    gate = 1.0
    if gates is not None:
        gate = tl.load(gates + row, cache_modifier=".cg")
    if CHOSEN:
        wait_for_inputs(OVERLAP)
    for j in tl.static_range(NUM_CHOSEN):
        total += factors[j] * tl.load(at_result[j], mask=ok, other=0.0).to(tl.float32)
    if shared is not None:
        own = tl.load(shared + row * dim + column, mask=ok, other=0.0).to(tl.float32)
        if gates is not None:
            own *= gate
        total += own
    tl.store(out + row * dim + column, total.to(out.dtype.element_ty), mask=ok)
