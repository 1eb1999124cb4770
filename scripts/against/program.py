"""What is measured of one checkout, in a process of its own: orders come in, seconds go out.

Runs under the code of either checkout, so it and the files beside it import nothing of ours but the
luceasync that they are given, and only surfaces that last; `lookup` has what was renamed.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from against.answers import Answers
from against.passes import Passes


def serve(orders: Any, replies: Any) -> None:
    """Answer each line with a line."""
    opened: Passes | Answers | None = None
    for line in orders:
        order = json.loads(line)
        if order["what"] == "open":
            opened = Answers(order) if order["kind"] == "engine" else Passes(order)
            reply: object = list(opened.cases)
        elif order["what"] == "sample":
            assert opened is not None
            reply = opened.cases[order["case"]]()
        else:
            assert opened is not None
            opened.close()
            opened, reply = None, None
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # whatever else prints does not answer
        serve(sys.stdin, replies)
