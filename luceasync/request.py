"""What the server and the engine say to each other: Request in, Deltas out, a Finish at the end.

Owns the words only. Knows nothing of HTTP, of token tensors or of who is listening.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from luceasync.status import EngineLook, EngineStatus

# What an answer's text has to be, in the words of whoever asks. Knows no grammar and no tokens.


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's text has to be. `source` says it: the JSON of a schema (for "json_object"
    it is none: any object will do), a regular expression of all of the text, a JSON list of texts,
    or a grammar in the notation of Lark or GBNF. `param` names the field that has it, in refusals.
    `strict`: a word of a schema that cannot be enforced is refused; otherwise it says nothing.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    source: str
    param: str
    strict: bool = True


# The served model as it is told to people and clients. Knows nothing of how it is served.


ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What `/v1/models` tells about the served model. `created` is a Unix time in seconds.

    `aliases` are other names of it; ANY_NAME among them is every name. `reasons`: why lanes and
    context are as they are, a line for each size that the user left open. `special_tokens` by the
    names that tokenizer_config.json gives them; `chat_template`: the source of its template.
    `tool_format`: how it writes calls of tools, "": in no way that is known; `thinks`: reasoning is
    told apart from its answers.
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
    thinks: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Its own name and the others, without ANY_NAME."""
        return (self.name, *(alias for alias in self.aliases if alias != ANY_NAME))

    def serves(self, name: str) -> bool:
        """Whether somebody who asks for `name` means this model."""
        return ANY_NAME in self.aliases or name in self.names


# What a model says in an answer, by type: its text, its reasoning, its calls of tools. Owns the
# words only: luceasync.text makes pieces, API families show them.


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A part of the answer's text, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A part of what the model thought before it answered, never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A call of the tool `name` begins, the answer's `index`th; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """A part of the arguments of call `index`, never empty; all of them together are a JSON object,
    unless the answer ended before they did.
    """

    index: int
    text: str


Piece = TextPiece | ReasoningPiece | CallPiece | ArgumentsPiece


FinishReason = Literal["stop", "length", "cancelled", "error"]
ErrorKind = Literal["failed", "request", "unavailable", "gave_way", "kv_host_memory"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. The defaults are greedy, without penalties.

    `temperature` 0 (below 1e-5) is greedy. `top_k` 0, `top_p` 1, `min_p` 0 switch a filter off.
    `logit_bias` maps token ids to what is added to their logits. `seed` None draws a fresh one.
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
    """What the chat template is given; `param` names a prompt of this kind in refusals. An answer
    has `max_calls` calls of tools at most; None: any number. `must_call`: it is nothing but calls
    of tools with these names; none: the model chooses. `marks`: messages, and after how many
    characters of their contents the client says that what is computed is worth keeping.
    `schema_places`: where the body has the schema of each tool's arguments, for refusals.
    """

    param: ClassVar[str] = "messages"
    messages: Sequence[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_calls: int | None = None
    must_call: tuple[str, ...] = ()
    schema_places: tuple[str, ...] = ()
    marks: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that is tokenized as it stands; "<|im_end|>" and the like are the tokens they name."""

    param: ClassVar[str] = "prompt"
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, taken as they are."""

    param: ClassVar[str] = "prompt"
    ids: tuple[int, ...]


Prompt = ChatPrompt | TextPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """One request, checked by the server and not yet rendered.

    `max_tokens` None means until the context is full; no end comes before `min_tokens`, unless a
    constraint wants it. `num_choices` answers are generated for the
    one prompt. `top_logprobs` None: no log-probabilities; 0: those of the chosen tokens only;
    `prompt_top_logprobs`: the same of the prompt's own, all of which is run then. What
    was computed for a `tenant` (an API key, or a salt that the server trusts; "" is shared) is
    never seen by another. `client`: who asks; lanes and places are shared between clients.
    `priority`: of what one client asks, the lowest has its turn first.
    `keep_prefix`: somebody asked for the prompt to be kept, whether or not an answer follows.
    `pins`: spans of its tokens, or its system message, that stay on the devices. `constraint`: what
    is said after reasoning; beside tools, an answer may be calls of them instead.
    `most_reasoning_tokens`: after so many it is closed; None: it ends by itself.
    `conversation`: what the client calls the one that it belongs to; "": nothing is known.
    """

    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
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
    """A token's text, bytes and natural-log probability, with the most probable others of its
    place.
    """

    token: str
    token_bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice. `cached_tokens` of the prompt were not prefilled again."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one choice went, in seconds. `decode_s` starts after the first token."""

    queued_s: float
    prefill_s: float
    decode_s: float
    num_prefilled: int
    num_decoded: int


@dataclass(frozen=True, slots=True)
class Restore:
    """What was taken up instead of being prefilled: `prefix_tokens` of the prompt, the furthest
    from `tier`, in `restore_s` seconds; `tier` None: nothing was.

    `decision` says why it was restored or run again, `miss_reason` why no more could be restored;
    the words are those of luceasync.prefix_tree.
    """

    tier: Literal["memory", "disk"] | None = None
    prefix_tokens: int = 0
    restore_s: float = 0.0
    decision: str | None = None
    miss_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for one choice: `accepted` of `proposed` draft tokens in `rounds` verify
    steps. `off_reason`: why it was given up or never began.
    """

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    off_reason: str | None = None

    @property
    def tau(self) -> float:
        """Tokens per verify step, bonus included; 0 before the first."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the draft's tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0


@dataclass(frozen=True, slots=True)
class Residence:
    """What of a choice's context was on the devices at its end, in tokens of whole chunks, and what
    has moved for it: chunks that left and came back, and looks that said which.
    """

    resident_tokens: int = 0
    absent_tokens: int = 0
    recalled: int = 0
    evicted: int = 0
    looks: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a choice ended. `error` holds the words when `reason` is "error"; `error_kind` "request":
    sent again it would end alike; "unavailable": not the request's fault, it may be sent again;
    "gave_way": the place was for a client that holds fewer; "kv_host_memory": host memory had no
    room for its context. `retry_after_s`: when to come back. `speculation` None: the server has no
    draft; `residence` None: all of a context stays on the devices. `stop`: the stop string that
    ended it.
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


@dataclass(frozen=True, slots=True)
class Delta:
    """What choice `index` has said since its last delta and is safe to show, in order, and the
    tokens that it came from.

    There may be no piece (a split UTF-8 character or a possible stop string is held back). `finish`
    is set on the last delta of a choice, which may carry pieces too. `prompt_logprobs`: of the
    prompt's next tokens, where they were asked for; the very first has none, NaN.
    """

    index: int
    pieces: tuple[Piece, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The answer's text in it."""
        return "".join([piece.text for piece in self.pieces if isinstance(piece, TextPiece)])

    @property
    def words(self) -> str:
        """All of it that is to be read: reasoning and text."""
        read = TextPiece | ReasoningPiece
        return "".join([piece.text for piece in self.pieces if isinstance(piece, read)])


class Stream(Protocol):
    """The answer to one admitted request: an async iterator of the deltas of all its choices.

    It ends after the last choice has finished. `aclose` frees the lanes at the engine's next step,
    wherever the request is, and may be called at any time, twice too.
    """

    @property
    def num_prompt_tokens(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    async def __anext__(self) -> Delta: ...

    async def aclose(self) -> None: ...


class Engine(Protocol):
    """What the server asks of an engine. All coroutines run on the server's event loop."""

    @property
    def card(self) -> ModelCard: ...

    def status(self) -> EngineStatus: ...

    async def open(self, request: Request) -> Stream:
        """Render, tokenize and admit `request`.

        Raises RequestError (what no retry mends), QueueFull, or Unavailable.
        """
        ...

    async def tokens(self, request: Request) -> tuple[int, ...]:
        """The ids of the request's prompt; nothing is run. Raises as `open` does."""
        ...

    async def look(self) -> EngineLook:
        """What is on its lanes and what it keeps, between two steps. Raises Unavailable."""
        ...

    async def drop_kept(self, keys: Sequence[str] | None) -> int:
        """Let go of kept nodes, those of these keys or all that nobody needs; how many are gone.
        Raises Unavailable.
        """
        ...

    def spelled(self, ids: Sequence[int], param: str) -> bytes:
        """What `ids` stand for, special tokens too. Raises RequestError, which names `param`, for
        an id that is none.
        """
        ...
