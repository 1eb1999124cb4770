"""The exceptions of luceasync, each with the words that a user will read.

LuceasyncError
├── ConfigError            a flag, variable, file or model directory that cannot be honoured; exit 2
│   ├── PlacementError     devices or weights that give no plan
│   └── ModelError         a model directory that is not what it should be
├── RequestError           the request is wrong; an HTTP 4xx, `param` names the field
│   └── ContextLengthError the prompt does not fit the context
├── GenerationFailed       an answer that was begun could not be finished; 500
├── SnapshotMismatch       saved state that is not what this model and split would have saved
│   ├── CorruptNode        a node file that is damaged
│   └── ForeignNode        a sound file that is no node of this namespace
├── StageFailed            a group of shards cannot go on; ends what ran on it, 503
├── DraftFailed            a drafter in another process is gone; costs no request
├── ChannelClosed          the other end of a channel is gone, silent, or not to be believed
│   └── PeerRefused        it lives, but does not belong to this end
├── EventsOutOfTurn        a group hears of changes of pages in another order than they were made
├── HostMemorySpent        a lane's tokens find no room in host memory; 503 for its request alone
├── Unsupported            the model's family cannot do what was asked
├── QueueFull              every lane and every place in the queue is taken; 429
│   └── GaveWay            the place was for a client that holds fewer
└── Unavailable            not loaded yet, shutting down, or the engine failed; 503
    └── NoHostMemory       host memory has no room for the context of this one
"""


class LuceasyncError(Exception):
    """Base of everything that luceasync raises on purpose."""


class ConfigError(LuceasyncError):
    """A setting that cannot be honoured. One line: the flag, the value, what is allowed."""


class PlacementError(ConfigError):
    """Devices or weights from which no layer split follows."""


class ModelError(ConfigError):
    """A model directory that cannot be served: what was found, what was expected."""


class RequestError(LuceasyncError):
    """A request that can never succeed as it stands.

    `param` is the JSON path of the field at fault (None: the request as a whole), `code` a stable
    word for programs, `status` the HTTP status.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class ContextLengthError(RequestError):
    """The prompt has more tokens than a lane can hold, in OpenAI's words: clients parse them."""

    def __init__(
        self,
        max_ctx_tokens: int,
        num_tokens: int,
        param: str = "messages",
        *,
        is_least: bool = False,
    ) -> None:
        """`is_least`: there are at least `num_tokens`; nobody has counted the others."""
        counted = f"at least {num_tokens}" if is_least else f"{num_tokens}"
        super().__init__(
            f"This model's maximum context length is {max_ctx_tokens} tokens. "
            f"However, your {param} resulted in {counted} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )


class GenerationFailed(LuceasyncError):
    """The engine could not finish an answer; the message says why."""


class SnapshotMismatch(LuceasyncError):
    """Saved state that cannot be taken up: which tensor, what it is, what was expected."""


class CorruptNode(SnapshotMismatch):
    """A node file that is not as it was written: what was found, what was expected."""


class ForeignNode(SnapshotMismatch):
    """A file that is nobody's damage, but holds no node of this schema and namespace."""


class StageFailed(LuceasyncError):
    """A group of shards cannot go on, and what its lanes held is lost. An event, not an end: a
    reset of every lane brings the group back, or raises this again.

    `group` is its number in the chain, `detail` what has happened to it.
    """

    def __init__(self, group: int, detail: str) -> None:
        super().__init__(f"group {group} of the model failed: {detail}")
        self.group = group


class DraftFailed(LuceasyncError):
    """A drafter in another process is gone, silent, or not to be believed. Its words end in an
    `off_reason`; no request fails with it.
    """


class ChannelClosed(LuceasyncError):
    """The other end of a channel is gone, silent beyond a deadline, or sends what cannot be
    believed; it counts as dead. The message says which.
    """


class PeerRefused(ChannelClosed):
    """Both ends live and do not belong together: what differs, with both values."""


class EventsOutOfTurn(LuceasyncError):
    """Changes of pages that are not the next ones: which, and after which."""


class HostMemorySpent(LuceasyncError):
    """What a lane can keep on its devices no longer has no room in host memory. The lane holds what
    it held; nothing else is concerned. `lane` is its number.
    """

    def __init__(self, lane: int, num_bytes: int) -> None:
        super().__init__(
            f"The memory for keys and values is spent: {num_bytes >> 10} KiB more found no room. "
            "Shorten the prompt, try again when others have ended, or raise --prefix-cache-memory."
        )
        self.lane = lane


class Unsupported(LuceasyncError):
    """What was asked is sound, but not for this model's family; the message says which."""


class QueueFull(LuceasyncError):
    """No lane is free and the queue is full; come back after `retry_after_s` seconds."""

    def __init__(self, num_queued: int, retry_after_s: int) -> None:
        super().__init__(
            f"The server is busy: {num_queued} requests are queued already. "
            f"Retry after {retry_after_s} s."
        )
        self.retry_after_s = retry_after_s


class GaveWay(QueueFull):
    """The queue is full, and the client held more of its places than another one who came."""

    def __init__(self, retry_after_s: int) -> None:
        LuceasyncError.__init__(
            self,
            "The server is busy: this request gave its place to a client that holds fewer. "
            f"Retry after {retry_after_s} s.",
        )
        self.retry_after_s = retry_after_s


class Unavailable(LuceasyncError):
    """The engine cannot take or finish requests now; the message says why. It may be worth a try
    after `retry_after_s` seconds.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoHostMemory(Unavailable):
    """An answer could not be finished since host memory had no room for its context."""
