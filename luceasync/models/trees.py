"""Rows that form trees in a verify pass: parents, and what each row sees.

Knows tensors only; callers decide which rows are proposed or accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1  # the parent of row 0, which is the lane's committed end


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a verify pass, one for each entry, all with the same number of rows.

    - `ancestors`: bool [entries, rows, rows], whether a row is the other's ancestor or itself.
    - `depths`: int32 [entries, rows], 0 for row 0.
    - `taps`: int [entries, rows, reach], for each row the places of the last `reach` inputs on its
      path, oldest first, in the committed window of `reach - 1` inputs followed by the rows.

        parents  -1 0 0 1        row 3 follows 1, which follows 0
        reach 3: the window is [w0 w1 | r0 r1 r2 r3] at places 0 .. 5
        taps     row 0: 0 1 2    row 1: 1 2 3    row 2: 1 2 4    row 3: 2 3 5
    """

    ancestors: Tensor
    depths: Tensor
    taps: Tensor


def chain(num_entries: int, num_rows: int, device: torch.device) -> Tensor:
    """Parents of rows that follow one another: int32 [entries, rows]."""
    parents = torch.arange(ROOT, num_rows - 1, dtype=torch.int32, device=device)
    return parents.expand(num_entries, -1)


def torch_trees(parents: Tensor, reach: int) -> Trees:
    """Build Trees from parents, int32 [entries, rows]: ROOT for row 0, an earlier row for the
    others. reach: inputs of the widest convolution, 1 without one.
    """
    num_entries, num_rows = parents.shape
    own = torch.arange(num_rows, device=parents.device)
    # Doubling: each product of the relation with itself reaches twice as many generations.
    seen = ((parents[..., None] == own) | (own[:, None] == own)).float()
    for _ in range((num_rows - 1).bit_length()):
        seen = (seen @ seen).clamp_(max=1)
    taps = [own.expand(num_entries, -1)]
    for _ in range(reach - 1):
        last = taps[-1]
        taps.append(parents.gather(1, last.clamp(min=0)).where(last >= 0, last - 1).long())
    depths = (seen.sum(-1) - 1).int()
    return Trees(seen > 0, depths, torch.stack(taps[::-1], -1) + (reach - 1))
