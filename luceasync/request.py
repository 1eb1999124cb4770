"""The values that server and engine exchange: a Request in, Deltas out, a Finish at the end.

Values and protocols only. Independent of HTTP and tensors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from luceasync.status import EngineDetails, EngineStatus


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the text of an answer. `source` is the JSON of a schema (empty for
    "json_object": any object), a regular expression for the whole text, a JSON list of texts, or a
    grammar in Lark or GBNF. `param` names its field, for errors. `strict`: keywords of a schema
    that cannot be enforced are refused; otherwise they are ignored.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    source: str
    param: str
    strict: bool = True


ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model, as `/v1/models` shows it. `created` is a Unix time in seconds.

    `aliases` are its other names; ANY_NAME among them stands for every name. `reasons` explain the
    sizes of lanes and context, a line for each that the user did not set. `special_tokens` are
    keyed by their names in tokenizer_config.json; `chat_template` is the source of its template.
    `tool_format` is how it writes tool calls, "" if unknown; `tells_tools`: its template renders no
    tools, so they are described in the system message; `thinks`: its reasoning is separated from
    its answers; `takes_chats`: it has a template, otherwise it only continues text; `fills_in`: it
    has tokens for fill-in-the-middle.
    """

    name: str
    created: int
    max_ctx_tokens: int
    num_parameters: int
    family: str
    aliases: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = ""
    tool_format: str = ""
    tells_tools: bool = False
    thinks: bool = False
    takes_chats: bool = True
    fills_in: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name and its aliases, without ANY_NAME."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY_NAME))

    @property
    def can_think(self) -> bool:
        """Whether the model may reason: its template mentions it."""
        template = self.chat_template.lower()
        return self.thinks and ("think" in template or "reason" in template)

    def serves(self, name: str) -> bool:
        """Whether a request for the model `name` is for this model."""
        return ANY_NAME in self.aliases or name in self.names


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of the answer's text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A part of the model's reasoning, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The start of tool call number `index` of the answer; its arguments follow. `own_id`: the id
    that the model has written, if any, which may repeat an earlier one.
    """

    index: int
    id: str
    name: str
    own_id: str = ""


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A part of the arguments of call `index`, never empty. Together the parts are a
    JSON object.
    """

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallPiece | ArgumentsPiece


FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorKind = Literal["failed", "request", "unavailable", "gave_way", "kv_host_memory"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy, without penalties.

    `temperature` 0 (below 1e-5) is greedy. `top_k` 0, `top_p` 1, `min_p` 0 disable a filter.
    `logit_bias` maps token ids to values added to their logits. `seed` None draws a random one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Input of the chat template. `param` names the messages in errors. An answer has at most
    `max_calls` tool calls; None: unlimited. `must_call`: the answer consists of calls of these
    tools; empty: the model chooses. `marks` are the client's cache marks, each a message and a
    number of characters of its content. `schema_places` are the fields with the schemas of the
    tools' arguments, for errors. `is_begun`: the last message is the beginning of the answer.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_calls: int | None = None
    must_call: tuple[str, ...] = ()
    schema_places: tuple[str, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()
    is_begun: bool = False
    param: str = "messages"


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text, tokenized without a template; "<|im_end|>" and the like become the tokens that they
    name.
    """

    param: ClassVar[str] = "prompt"
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used unchanged."""

    param: ClassVar[str] = "prompt"
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The text before and after the middle, and the beginning of the middle, `begun`; special
    tokens in them are ordinary text. `files` are names and texts of other files, the least
    important first: those that do not fit into the context are left out. `param` and `after_param`
    are the fields of the text before and after, for errors.
    """

    before: str
    after: str
    begun: str = ""
    files: tuple[tuple[str, str], ...] = ()
    param: str = "prompt"
    after_param: str = "suffix"


Prompt = ChatPrompt | TextPrompt | TokenPrompt | InfillPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked by the server and not yet rendered.

    `max_tokens` None: until the context is full. The answer does not end before `min_tokens`,
    unless a constraint ends it; a token of `stop_token_ids` ends it too, as does a line after the
    first that is indented by less than `least_indent`. `num_choices` answers are generated for the
    one prompt. `top_logprobs` None: no log-probabilities; 0: of the chosen tokens only;
    `prompt_top_logprobs`: the same for the prompt's own tokens, none of which are restored then.
    State computed for a `tenant` (an API key, or a salt that the server trusts; "" is shared) is
    never used for another. `client` is the unit between which lanes and places in the queue are
    shared; among the requests of one client, the one with the lowest `priority` comes first.
    `keep_prefix`: cache the prompt, whether or not an answer follows. `pins` are spans of its
    tokens, or its system message, that stay on the devices. `constraint` applies to the text after
    reasoning; with tools, an answer may consist of calls instead. `most_reasoning_tokens`:
    reasoning is closed after so many; None: no limit. `conversation` is the client's name for it;
    "": none.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    least_indent: int = 0
    ignore_eos: bool = False
    num_choices: int = 1
    top_logprobs: int | None = None
    prompt_top_logprobs: int | None = None
    tenant: str = field(default="", repr=False)
    client: str = field(default="", repr=False)
    keep_prefix: bool = False
    priority: int = 0
    pins: tuple[tuple[int, int], ...] | Literal["system"] = ()
    constraint: Constraint | None = None
    most_reasoning_tokens: int | None = None
    conversation: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's text, bytes and natural-log probability, with the most probable tokens at its
    position.
    """

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice. `cached_tokens` of the prompt were restored, not prefilled."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """The duration of the phases of one choice in seconds; `decode_s` begins with the
    first token.
    """

    queued_s: float
    prefill_s: float
    decode_s: float
    num_prefilled: int
    num_decoded: int


@dataclass(frozen=True, slots=True)
class Restore:
    """What was restored instead of prefilled: `prefix_tokens` of the prompt, the last of them from
    `tier`, in `restore_s` seconds. `tier` None: nothing.

    `decision` states why the prompt was restored or prefilled, `miss_reason` why no more could be
    restored, in the terms of luceasync.prefix_tree and luceasync.nodes.
    """

    tier: Literal["memory", "disk"] | None = None
    prefix_tokens: int = 0
    restore_s: float = 0.0
    decision: str | None = None
    miss_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation for one choice: `accepted` of `proposed` draft tokens in `rounds` verify steps.
    `off_reason` states why it was switched off or never began.
    """

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    off_reason: str | None = None

    @property
    def tau(self) -> float:
        """Tokens per verify step, including the bonus token; 0 before the first step."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the draft's tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True, slots=True)
class Residence:
    """Which part of a choice's context was on the devices at its end, in tokens of whole chunks,
    and how many chunks were recalled and evicted for it, by how many probes (`looks`).
    """

    resident_tokens: int = 0
    absent_tokens: int = 0
    recalled: int = 0
    evicted: int = 0
    looks: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Why and how a choice ended. `error` is the message if `reason` is "error". `error_kind` is
    "request": sent again, it would end the same; "unavailable": it may be sent again; "gave_way":
    its place went to a client that holds fewer places; "kv_host_memory": its context did not fit
    into host memory; "failed": a bug in luceasync. `retry_after_s` is the time after which to
    retry. `speculation` None: the server has no drafter; `residence` None: contexts stay on the
    devices completely. `stop` is the stop string that ended the choice. `num_left_out` is the
    number of files of the prompt that did not fit into the context.
    """

    reason: FinishReason
    usage: Usage
    timings: Timings
    error: str | None = None
    restore: Restore = Restore()
    speculation: Speculation | None = None
    error_kind: ErrorKind = "failed"
    retry_after_s: int = 1
    residence: Residence | None = None
    stop: str | None = None
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of choice `index`, in order, and the tokens that it came from.

    There may be no piece while a split UTF-8 character or a possible stop string is held back.
    `finish` is set on the last delta of a choice, which may carry pieces too. `prompt_logprobs` are
    those of the prompt's next tokens, if requested; that of the very first token is NaN.
    """

    index: int
    pieces: tuple[Piece, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The answer's text in this delta."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, TextPiece)])

    @property
    def words(self) -> str:
        """Reasoning and text in this delta."""
        read = TextPiece | ReasoningPiece
        return "".join([piece.text for piece in self.pieces if isinstance(piece, read)])


class Stream(Protocol):
    """The answer to one accepted request: an async iterator of the deltas of all its choices.

    It ends after the last choice has finished. `aclose` frees the lanes at the engine's next step;
    it may be called at any time, and more than once.
    """

    @property
    def num_prompt_tokens(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """The interface of an engine for the server. All coroutines run on the server's event loop."""

    @property
    def card(self) -> ModelCard: ...

    def status(self) -> EngineStatus: ...

    def check_ready(self) -> None:
        """Raise Unavailable unless requests are accepted."""
        ...

    async def open(self, request: Request) -> Stream:
        """Render, tokenize and queue `request`.

        Raises RequestError if a retry would not help, otherwise QueueFull or Unavailable.
        """
        ...

    def sent(self) -> None:
        """The caller has sent an answer that has ended, or given it up. What an engine does with
        ended answers may wait for this, so that it does not hold up their last bytes."""
        ...

    async def tokens(self, request: Request) -> tuple[int, ...]:
        """The token ids of the request's prompt, without running it. Raises like `open`."""
        ...

    async def details(self) -> EngineDetails:
        """Lanes, queue and cached nodes, read between two steps. Raises Unavailable."""
        ...

    async def drop_nodes(self, keys: Sequence[str] | None) -> int:
        """Drop cached nodes, those with these keys or all that no request needs. Returns their
        number. Raises Unavailable.
        """
        ...

    def token_bytes(self, ids: Sequence[int], param: str) -> bytes:
        """The bytes of `ids`, including special tokens. Raises RequestError, which names `param`,
        for an id outside the vocabulary.
        """
        ...
