"""Which routes OpenAI's API has here, and how it tells a failure.

Owns the list. Knows nothing of what an endpoint does.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.routing import Route

from luceasync.request import Engine
from luceasync.server.failures import Failure
from luceasync.server.family import Endpoint
from luceasync.server.openai.chat import ChatCompletions
from luceasync.server.openai.completions import Completions
from luceasync.server.openai.errors import ErrorBody, error_body
from luceasync.server.openai.models import ModelPages
from luceasync.server.openai.responses.endpoint import Responses
from luceasync.server.openai.tokenizing import Detokenize, Tokenize, TokenizerPages


class OpenAi:
    """See luceasync.server.family.Family."""

    def __init__(self, engine: Engine) -> None:
        self.endpoints: Sequence[Endpoint] = (
            ChatCompletions(engine),
            Completions(engine),
            Responses(engine),
            Tokenize(engine),
            Detokenize(engine),
        )
        self.pages: Sequence[Route] = [*ModelPages(engine).routes, *TokenizerPages(engine).routes]

    def error(self, failure: Failure) -> ErrorBody:
        return error_body(failure)
