"""What other prefills will have kept of a prompt that waits.

Choices alone: knows no tree, no lane and no files.
"""

from __future__ import annotations

from luceasync.keeping.lease import Lease
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.prefix.node import common_prefix


def shared_tokens(lease: Lease, running: Lease) -> int:
    """How many tokens the prompts of both begin with, if they may know of each other."""
    is_ours = lease is not running and lease.tenant == running.tenant
    return common_prefix(lease.prompt, running.prompt) if is_ours else 0


def tokens_to_come(lease: Lease, running: Lease, *, recurrent: bool) -> int:
    """How many tokens of the lease's prompt the prefill of `running` will have kept when it is
    through.
    """
    if not running.cuts or lease.is_run_whole:
        return 0
    prompt, shared = lease.prompt, shared_tokens(lease, running)
    if shared == len(prompt) == running.num_prompt_tokens:
        return shared  # with the logits after it: nothing is left to run
    usable = min(shared, len(prompt) - 1)
    ends = [cut.end for cut in running.cuts]
    whole = max((end for end in ends if end <= usable), default=0)
    if recurrent or ends[-1] < usable:
        return whole
    return max(whole, usable // CHUNK_TOKENS * CHUNK_TOKENS)
