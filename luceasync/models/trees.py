"""Rows that form trees, as a verify pass runs them: who follows whom, and what each row sees.

Knows tensors only: which rows are proposed and which are accepted is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1  # the parent of row 0, which is the lane's committed end


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a verify pass, one an entry, with the same number of rows each.

    `ancestors` bool [entries, rows, rows]: ancestor or self. `depths` int32 [entries, rows]: 0 for
    row 0. `taps` int [entries, rows, reach]: for each row the places of the last `reach` inputs on
    its path, oldest first, in the committed window of `reach - 1` inputs followed by the rows.
    """

    ancestors: Tensor
    depths: Tensor
    taps: Tensor


def chain(num_entries: int, num_rows: int, device: torch.device) -> Tensor:
    """Parents int32 [entries, rows] of rows that follow each other."""
    parents = torch.arange(ROOT, num_rows - 1, dtype=torch.int32, device=device)
    return parents.expand(num_entries, -1)


def torch_trees(parents: Tensor, reach: int) -> Trees:
    """parents: int32 [entries, rows], ROOT for row 0 and a row before its own for every other;
    reach: the width of the widest convolution, 1 if there is none.
    """
    num_entries, num_rows = parents.shape
    own = torch.arange(num_rows, device=parents.device)
    # Ancestors of the second degree from those of the first, of the fourth from those, ...
    seen = ((parents[..., None] == own) | (own[:, None] == own)).float()
    for _ in range((num_rows - 1).bit_length()):
        seen = (seen @ seen).clamp_(max=1)
    taps = [own.expand(num_entries, -1)]
    for _ in range(reach - 1):
        last = taps[-1]
        taps.append(parents.gather(1, last.clamp(min=0)).where(last >= 0, last - 1).long())
    depths = (seen.sum(-1) - 1).int()
    return Trees(seen > 0, depths, torch.stack(taps[::-1], -1) + (reach - 1))
