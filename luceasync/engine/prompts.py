"""Renders the prompt of a request to token ids.

Knows the template, where turns end and the history of a tenant. Does not know lanes, the queue or
how tokens are chosen.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NoReturn

from luceasync.errors import ContextLengthError, RequestError, TemplateRefusal
from luceasync.kv.pages import CHUNK_TOKENS
from luceasync.prefix_cache.lookup import MAX_TAIL_TOKENS
from luceasync.prefix_cache.tenants import Tenants
from luceasync.request import (
    ArgumentsPiece,
    CallPiece,
    ChatPrompt,
    InfillPrompt,
    ModelCard,
    Request,
    TextPrompt,
    TokenPrompt,
)
from luceasync.text.answer.answer_format import TOOL, AnswerFormat
from luceasync.text.answer.pieces import PieceMaker
from luceasync.text.infill import InfillParts, infill_ids
from luceasync.text.prompt import CallRecorder, PastCall, RenderedPrompt, Tenant
from luceasync.text.roles import FitMessages, Roles
from luceasync.text.shared_prefix import (
    CommonPrefix,
    ReplayCheck,
    ReplayResults,
    ToolsBlock,
    begun_answer,
    marked_tokens,
    shared_ids,
)
from luceasync.text.template import Template, TurnBoundaries
from luceasync.text.tokenizer import Tokenizer, refuse_too_long

PIN_PARAM = "kvflash_pin"

ChatMessage = Mapping[str, Any]
PinSpans = tuple[tuple[int, int], ...]  # tokens [begin, end)


@dataclass(frozen=True, slots=True)
class PinLimit:
    """How many chunks of a lane may be pinned besides the first one; `always` spans are pinned in
    each lane."""

    num_chunks: int
    always: PinSpans = ()


@dataclass(frozen=True, slots=True)
class Language:
    """The text side of a model, and the limits that a request is checked against. `pin_limit` None:
    all of a lane stays on the devices. `answers`, `roles`, `turns`: learned from the template,
    `tool_roles` for chats with tools. `renders_here`: the template is rendered in this process, in
    time that grows only with the length of the messages."""

    card: ModelCard
    tokenizer: Tokenizer
    template: Template
    vocab_size: int
    num_lanes: int
    pin_limit: PinLimit | None = None
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    roles: Roles = field(default_factory=Roles)
    tool_roles: Roles = field(default_factory=Roles)
    turns: TurnBoundaries = field(default_factory=TurnBoundaries)
    renders_here: bool = False

    def calls_in(self, ids: Sequence[int]) -> Iterator[PastCall]:
        """The calls in token ids that the model has generated, whichever tools they name."""
        spelled = self.tokenizer.spell(ids).decode("utf-8", "replace")
        name = ""
        for piece in self.answers.maker("", (TOOL,)).make(spelled, is_last=True):
            match piece:
                case CallPiece(_, _, called):
                    name = called
                case ArgumentsPiece(_, arguments):
                    yield PastCall(name, arguments)


class Prompts:
    """Renders requests. May be used from worker threads: encoding takes long."""

    def __init__(self, language: Language, tenants: Tenants) -> None:
        self._language = language
        self._tenants = tenants
        self._turns = language.turns
        self._common_prefix = CommonPrefix(language.tokenizer)
        self._replayed = ReplayResults()
        self._tools_block = ToolsBlock(language.template, self._common_prefix)

    def render(self, request: Request) -> RenderedPrompt:
        """Render the request's prompt. Raises RequestError, and ContextLengthError for one that
        leaves no room for an answer.
        """
        tenant, param = self._tenants.get(request.tenant), request.prompt.param
        max_ctx = self._language.card.max_ctx_tokens
        match request.prompt:
            case ChatPrompt() as chat:
                recalled = tenant.calls.recall(chat.messages)
                try:
                    prompt = self._first_fitted(tenant, request, chat, recalled)
                except ContextLengthError as error:  # the guard has no field names
                    raise error.named(param) from None
            case TextPrompt(text):
                prompt = self._of_text(tenant, text, param)
            case InfillPrompt() as infill:
                prompt = self._of_infill(tenant, infill, request.max_tokens)
            case TokenPrompt(ids) if len(ids) >= max_ctx:
                raise ContextLengthError(max_ctx, len(ids), param)
            case TokenPrompt(ids):
                prompt = self._of_ids(tenant, ids)
        if len(prompt.ids) >= max_ctx:
            raise ContextLengthError(max_ctx, len(prompt.ids), param)
        if not prompt.ids:
            raise RequestError(f"{param}: the rendered prompt is empty", param=param)
        return prompt

    def _first_fitted(
        self,
        tenant: Tenant,
        request: Request,
        chat: ChatPrompt,
        recalled: Sequence[ChatMessage],
    ) -> RenderedPrompt:
        """The prompt in the first form that the template accepts. If it refuses all, raises the
        first refusal."""
        refusals: list[TemplateRefusal] = []
        roles = self._language.tool_roles if chat.tools else self._language.roles
        for fit in roles.fits:
            try:
                return self._fitted(tenant, request, chat, recalled, fit)
            except TemplateRefusal as refusal:
                refusals.append(refusal)
        raise refusals[0]

    def _fitted(
        self,
        tenant: Tenant,
        request: Request,
        chat: ChatPrompt,
        recalled: Sequence[ChatMessage],
        fit: FitMessages,
    ) -> RenderedPrompt:
        """The prompt of a chat whose messages, `recalled`, are fitted to the template."""
        messages = fit(recalled)
        is_beginning = _is_beginning(request, messages)
        prompt = (
            self._prefix(tenant, chat, messages)
            if is_beginning
            else self._of_chat(tenant, chat, messages, has_form=request.constraint is not None)
        )
        if not chat.marks:
            return prompt
        return replace(prompt, marks=self._marks(prompt, chat, recalled, fit))

    def _of_chat(
        self, tenant: Tenant, chat: ChatPrompt, messages: Sequence[ChatMessage], *, has_form: bool
    ) -> RenderedPrompt:
        """`messages`: those of the chat, fitted to the template's roles. `has_form`: the request
        constrains the text, so JSON in it is not a tool call."""
        template, tokenizer = self._language.template, self._language.tokenizer
        if chat.is_begun:
            text = begun_answer(template, messages, chat.tools, **chat.template_kwargs)
        else:
            text = template.render(messages, chat.tools, **chat.template_kwargs)
        ids, num_known = self._recall(tenant, text, chat.param)
        boundaries = tuple(self._turns.ends(ids))

        def new_pieces() -> PieceMaker:
            answers = self._language.answers
            maker = answers.maker(text, chat.tools, chat.max_calls, reads_json=not has_form)
            return CallRecorder(maker, tenant.calls)

        said = messages, chat.tools, chat.template_kwargs
        return RenderedPrompt(
            tenant,
            text,
            ids,
            boundaries,
            answer_returns=ReplayCheck.of(template, tokenizer, text, *said, self._replayed),
            tools_end=self._tools_block.end(text, ids, *said),
            new_pieces=new_pieces,
            before=self._language.answers.before(text),
            has_unknown_answers=has_unknown_answers(messages, boundaries, num_known),
        )

    def _marks(
        self,
        prompt: RenderedPrompt,
        chat: ChatPrompt,
        messages: Sequence[ChatMessage],
        fit: FitMessages,
    ) -> tuple[int, ...]:
        """The client's cache marks as token counts; `messages` as the client sent them. None for a
        prompt that is not answered."""
        if prompt.text is None:
            return ()

        def render(said: Sequence[ChatMessage]) -> str:
            return self._language.template.render(fit(said), chat.tools, **chat.template_kwargs)

        text, ids, marks = prompt.text, prompt.ids, chat.marks
        return marked_tokens(self._common_prefix, text, ids, messages, marks, render)

    def _of_text(self, tenant: Tenant, text: str, param: str) -> RenderedPrompt:
        lead, infill = self._language.tokenizer.lead, self._language.tokenizer.infill
        text = text if text.startswith(lead) else lead + text
        ids, _ = self._recall(tenant, text, param)
        # The editor may have written the notation into the prompt itself.
        ends = infill.ends if infill is not None and infill.middle in ids else frozenset()
        return RenderedPrompt(tenant, text, ids, tuple(self._turns.ends(ids)), ends=ends)

    def _of_infill(
        self, tenant: Tenant, prompt: InfillPrompt, max_tokens: int | None
    ) -> RenderedPrompt:
        """A fill-in-the-middle prompt. Raises RequestError if the model's tokenizer has no tokens
        for it."""
        tokenizer, max_ctx = self._language.tokenizer, self._language.card.max_ctx_tokens
        if (tokens := tokenizer.infill) is None:
            raise RequestError(
                f"{prompt.after_param}: the model only continues text; its tokenizer has no tokens "
                "to fill in",
                param=prompt.after_param,
            )

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, special=False)

        for text in (prompt.before, prompt.after, prompt.begun):
            refuse_too_long(tokenizer, text, max_ctx, prompt.param)
        parts = InfillParts(
            encode(prompt.before),
            encode(prompt.after),
            encode(prompt.begun),
            tokenizer.encode(tokenizer.lead),
            [(encode(f"{name}\n"), encode(text)) for name, text in prompt.files],
        )
        wanted = max_ctx // 4 if max_tokens is None else max_tokens
        made = infill_ids(tokens, parts, encode, max_ctx - max(1, min(wanted, max_ctx // 4)))
        return RenderedPrompt(
            tenant,
            None,
            array("i", made.ids),
            made.boundaries,
            ends=tokens.ends,
            num_left_out=made.num_left_out,
        )

    def _recall(self, tenant: Tenant, text: str, param: str) -> tuple[array[int], int]:
        """Encode `text`, reusing the ids that the history has for it, and return how many were
        reused. Raises ContextLengthError, early if the text is far too long."""
        max_ctx = self._language.card.max_ctx_tokens
        refuse_too_long(self._language.tokenizer, text, max_ctx, param)
        return tenant.history.recalled(text)

    def _of_ids(self, tenant: Tenant, ids: tuple[int, ...]) -> RenderedPrompt:
        """Token ids as sent. They are not remembered: a text keeps the ids that this server
        generated, not those that a client made up."""
        check_ids(ids, self._language.vocab_size)
        packed = array("i", ids)
        return RenderedPrompt(tenant, None, packed, tuple(self._turns.ends(packed)))

    def _prefix(
        self, tenant: Tenant, chat: ChatPrompt, messages: Sequence[ChatMessage]
    ) -> RenderedPrompt:
        """The common prefix of all prompts that continue the messages. It is not answered, so no
        text is remembered."""
        ids = shared_ids(
            self._language.template,
            self._turns,
            lambda text: self._recall(tenant, text, chat.param)[0],
            messages,
            chat.tools,
            chat.template_kwargs,
        )
        return RenderedPrompt(tenant, None, ids, (*self._turns.ends(ids), len(ids)))


def check_ids(ids: Sequence[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise RequestError, naming `param`, for the first of `ids` outside the vocabulary."""
    for place, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}[{place}] is token {token_id}; the tokens are 0 to {vocab_size - 1}.",
                param=param,
            )


def has_unknown_answers(
    messages: Sequence[ChatMessage], boundaries: Sequence[int], num_known: int
) -> bool:
    """Whether a prompt of these messages may hold answers after its first `num_known` tokens.
    `boundaries`: where its turns end; the results of several tools may be one turn. Pure."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        return False
    later = roles[len(roles) - roles[::-1].index("assistant") :]
    num_turns = sum(1 for _ in groupby(later))
    # The template may spell the end of an answer differently from the model: it is not remembered.
    num_unknown = sum(boundary > num_known + MAX_TAIL_TOKENS for boundary in boundaries)
    return num_known == 0 or num_unknown > num_turns


def _is_beginning(request: Request, messages: Sequence[ChatMessage]) -> bool:
    """Whether the messages are only to be cached, and a user's turn follows rather than an
    answer."""
    is_answered = bool(messages) and messages[-1]["role"] in ("user", "tool")
    return request.keep_prefix and request.max_tokens == 0 and not is_answered


def pins_of(request: Request, prompt: RenderedPrompt, limit: PinLimit | None) -> PinSpans:
    """The spans of the prompt that stay on the devices, as the request asks; none if `limit` is
    None, since everything stays. Raises RequestError.
    """
    if not request.pins:
        return ()
    spans = ((0, _system_end(request, prompt)),) if request.pins == "system" else request.pins
    num_tokens = len(prompt.ids)
    for begin, end in spans:
        if end > num_tokens:
            _refuse_pins(f"[{begin}, {end}] goes beyond the prompt, which has {num_tokens} tokens")
    if limit is None:
        return ()
    num_chunks, num_always = _num_chunks((*spans, *limit.always)), _num_chunks(limit.always)
    if num_chunks > limit.num_chunks:
        fit = (limit.num_chunks - num_always) * CHUNK_TOKENS
        asked = (num_chunks - num_always) * CHUNK_TOKENS
        _refuse_pins(
            f"{asked} tokens, in chunks of {CHUNK_TOKENS}; {fit} fit besides the first chunk"
        )
    return spans


def _system_end(request: Request, prompt: RenderedPrompt) -> int:
    """Where the system message ends, including the tools that templates put into it."""
    asked = request.prompt
    first = asked.messages[0]["role"] if isinstance(asked, ChatPrompt) and asked.messages else None
    if first != "system" or not prompt.boundaries:
        _refuse_pins('"system", but the prompt does not begin with a system message')
    return prompt.boundaries[0]


def _num_chunks(spans: PinSpans) -> int:
    """How many chunks the spans touch, apart from the lane's first one."""
    touched = {
        c for begin, end in spans for c in range(begin // CHUNK_TOKENS, -(-end // CHUNK_TOKENS))
    }
    return len(touched - {0})


def _refuse_pins(words: str) -> NoReturn:
    raise RequestError(f"Invalid value for '{PIN_PARAM}': {words}.", param=PIN_PARAM)
