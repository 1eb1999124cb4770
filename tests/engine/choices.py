"""Choices that are ready to run, without a server or a template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from luceasync.engine.prepare import PreparedChoice
from luceasync.prefix_cache.tenants import NO_TENANT
from luceasync.request import Request, TokenPrompt
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.tokenizer import Tokenizer
from tests.prompts import rendered

OF_REQUEST = {"client", "keep_prefix", "priority", "prompt_top_logprobs", "sampling"}
OF_REQUEST |= {"conversation", "top_logprobs"}


def make_choice(
    prompt_ids: Sequence[int],
    *,
    tokenizer: Tokenizer | None = None,
    stop: tuple[str, ...] = (),
    tenant: bytes = NO_TENANT,
    boundaries: Sequence[int] = (),
    **fields: Any,
) -> PreparedChoice:
    """`fields`: of the Request or of the PreparedChoice; greedy, 100 tokens, no end token."""
    asked = {name: fields.pop(name) for name in OF_REQUEST & fields.keys()}
    detokenizer = fields.pop("detokenizer", None) or Detokenizer(tokenizer, stop)
    defaults = {"stream_id": 1, "index": 0, "max_tokens": 100, "stop_ids": frozenset(), "seed": 0}
    return PreparedChoice(
        Request(TokenPrompt(tuple(prompt_ids)), **asked),
        rendered(prompt_ids, boundaries, tenant),
        **{**defaults, "counts": None, **fields},
        tokenizer=tokenizer,
        detokenizer=detokenizer,
    )
