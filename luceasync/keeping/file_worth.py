"""What of a generation's nodes is worth a file, and of which the state goes with it.

Pure choices. A state takes as many bytes as thousands of tokens, so not every one is written.
"""

from __future__ import annotations

from luceasync.keeping.chunks import MAX_OPENER_TOKENS
from luceasync.keeping.lease import Lease
from luceasync.prefix.node import Node

MIN_GUARDED_TOKENS = 1024  # fewer are soon run again
MAX_STATES_SHARE = 0.1  # of the bytes of the rows that states guard


def at_use(lease: Lease, num_tokens: int, *, recurrent: bool) -> bool:
    """Whether the end of a node that is taken up is to be on the disk too: one whose end is more
    than logits, and which few tokens do not give again. They are `num_tokens`, from the state
    before it that the disk has.
    """
    return lease.keep_prompt or (recurrent and num_tokens > MAX_OPENER_TOKENS)


def at_cut(lease: Lease, node: Node, *, recurrent: bool) -> bool | None:
    """Whether a node of the prompt that was just kept is written with its end; None where that is
    for what follows to say: the answer's end serves better than the prompt's.

    Written are the ends where other prompts part from this one, what the disk has without its end
    and was run again for that, and what guards a long prefill that may not come to its own end.
    """
    is_last = node.end == lease.num_prompt_tokens
    if is_last and lease.keep_prompt:
        return True
    if is_last and lease.is_opening(node):
        return None
    if not recurrent:
        return True
    is_again = "disk" in node.tiers - node.state_tiers and node.is_turn_end | is_last
    if is_last:
        return is_again or None
    is_parting = node.end in (lease.opener, *lease.forks, *lease.boundaries[:1])
    return is_parting or is_again or _guards(node, node.end - lease.safe_end)


def at_end(lease: Lease, tip: Node, *, recurrent: bool) -> bool:
    """Whether the last node that is kept of a generation is written with its end, though it was
    there before: nothing came after it, and the state is needed to go on from there.
    """
    return recurrent and not lease.is_opening(tip)


def _guards(node: Node, num_tokens: int) -> bool:
    """Whether the state at the node's end takes few bytes beside the rows of the `num_tokens`
    before it, which would be run again without it.
    """
    rows_bytes = num_tokens * node.num_bytes / len(node.tokens)
    return num_tokens >= MIN_GUARDED_TOKENS and node.state_bytes <= MAX_STATES_SHARE * rows_bytes
