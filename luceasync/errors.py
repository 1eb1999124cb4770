"""The exceptions of luceasync. Their messages are shown to users.

LuceasyncError
├── ConfigError            a flag, variable, file or model directory that cannot be honoured; exit 2
│   ├── PlacementError     devices or weights that give no plan
│   └── ModelError         a model directory that cannot be served
├── RequestError           an invalid request: HTTP 4xx, `param` names the field
│   ├── ContextLengthError the prompt does not fit the context
│   ├── TemplateRefusal    the chat template does not take the messages
│   └── TemplateOverrun    the chat template takes too much time or memory
├── GenerationFailed       an answer that was begun could not be finished; 500
├── SnapshotMismatch       saved state that this model and split would not have saved
│   ├── CorruptNode        a damaged node file
│   └── ForeignNode        an intact file that is not a node of this namespace
├── StageFailed            a stage cannot go on; ends the requests it carried, 503
├── DraftFailed            a drafter in another process is gone; costs no request
├── ChannelClosed          the other end of a channel is gone, silent, or sends nonsense
│   └── PeerMismatch       the other end is alive, but does not match this end
├── PageEventsOutOfOrder   a stage receives page events out of order
├── LaneMemoryExhausted    no room in host memory for a lane's tokens; 503 for its request alone
├── Unsupported            the model's family cannot do what was asked
├── QueueFull              every lane and every place in the queue is taken; 429
│   └── DisplacedFromQueue the place went to a client that holds fewer
└── Unavailable            not loaded yet, shutting down, or the engine failed; 503
    └── HostMemoryExhausted no room in host memory for the context of this request
"""

from __future__ import annotations


class LuceasyncError(Exception):
    """Base of all exceptions that luceasync raises deliberately."""

    @property
    def headline(self) -> str:
        """The message without the last log lines of a process, which were already logged."""
        return str(self).partition("\n")[0].removesuffix("; its last lines:")


class ConfigError(LuceasyncError):
    """A setting that cannot be honoured. One line: the flag, the value, what is allowed."""


class PlacementError(ConfigError):
    """Devices or split weights for which there is no valid layer split."""


class ModelError(ConfigError):
    """A model directory that cannot be served: what was found, and what was expected."""


class RequestError(LuceasyncError):
    """An invalid request; sent again, it would fail again.

    `param` is the JSON path of the invalid field (None: the request as a whole), `code` a stable
    identifier for programs, `status` the HTTP status.
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
    """The prompt has more tokens than a lane can hold, in OpenAI's wording, which clients parse."""

    def __init__(
        self,
        max_ctx_tokens: int,
        num_tokens: int,
        param: str = "messages",
        *,
        is_least: bool = False,
    ) -> None:
        """`is_least`: `num_tokens` is a lower bound."""
        self._counted = max_ctx_tokens, num_tokens, is_least
        counted = f"at least {num_tokens}" if is_least else f"{num_tokens}"
        super().__init__(
            f"This model's maximum context length is {max_ctx_tokens} tokens. "
            f"However, your {param} resulted in {counted} tokens. "
            f"Please reduce the length of the {param}.",
            param=param,
            code="context_length_exceeded",
        )

    def named(self, param: str) -> ContextLengthError:
        """The same error for the field `param`."""
        max_ctx_tokens, num_tokens, is_least = self._counted
        return ContextLengthError(max_ctx_tokens, num_tokens, param, is_least=is_least)


class TemplateRefusal(RequestError):
    """The model's chat template does not accept the messages in this form; the message gives the
    reason.
    """


class TemplateOverrun(RequestError):
    """The model's chat template exceeds a limit for the messages. `excess` describes it: "takes
    more than 5 s".
    """

    def __init__(self, excess: str) -> None:
        super().__init__(
            f"The model's chat template {excess} for these messages.",
            param="messages",
            code="template_overrun",
        )
        self.excess = excess


class GenerationFailed(LuceasyncError):
    """The engine could not finish an answer; the message gives the reason."""


class SnapshotMismatch(LuceasyncError):
    """Saved state that cannot be restored: which tensor, what it is, what was expected."""


class CorruptNode(SnapshotMismatch):
    """A node file that changed since it was written: what was found, what was expected."""


class ForeignNode(SnapshotMismatch):
    """An intact file that holds no node of this schema and namespace."""


class StageFailed(LuceasyncError):
    """A stage failed, and the contents of its lanes are lost. Resetting every lane restarts the
    stage, or raises this again.

    `stage` is its index in the chain, `detail` describes the failure.
    """

    def __init__(self, stage: int, detail: str) -> None:
        super().__init__(f"stage {stage} of the model failed: {detail}")
        self.stage = stage


class DraftFailed(LuceasyncError):
    """A drafter in another process is gone, silent, or sends invalid messages. The message becomes
    an `off_reason`; no request fails because of it.
    """


class ChannelClosed(LuceasyncError):
    """The other end of a channel is gone, silent beyond a deadline, or sends invalid messages; it
    is treated as dead. The message describes the failure.
    """


class PeerMismatch(ChannelClosed):
    """Both ends are alive but do not match: what differs, with both values."""


class PageEventsOutOfOrder(LuceasyncError):
    """Page events that are out of order: which events, and after which."""


class LaneMemoryExhausted(LuceasyncError):
    """No room in host memory for the part of a lane's contents that no longer fits on its devices.
    The lane is unchanged, and no other lane is affected. `lane` is its index.
    """

    def __init__(self, lane: int, num_bytes: int) -> None:
        super().__init__(
            f"The memory for keys and values is exhausted: no room for {num_bytes >> 10} KiB more. "
            "Shorten the prompt, retry when other requests have ended, or raise "
            "--prefix-cache-memory."
        )
        self.lane = lane


class Unsupported(LuceasyncError):
    """The model's family cannot do what was requested; the message names it."""


class QueueFull(LuceasyncError):
    """No lane is free and the queue is full; retry after `retry_after_s` seconds."""

    def __init__(self, num_queued: int, retry_after_s: int) -> None:
        super().__init__(
            f"The server is busy: {num_queued} requests are queued. Retry after {retry_after_s} s."
        )
        self.retry_after_s = retry_after_s


class DisplacedFromQueue(QueueFull):
    """The queue is full, and its place went to a client that holds fewer places."""

    def __init__(self, retry_after_s: int) -> None:
        LuceasyncError.__init__(
            self,
            "The server is busy: this request lost its place in the queue to a client that holds "
            "fewer. "
            f"Retry after {retry_after_s} s.",
        )
        self.retry_after_s = retry_after_s


class Unavailable(LuceasyncError):
    """The engine cannot accept or finish requests now; the message gives the reason. Retrying may
    help after `retry_after_s` seconds.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class HostMemoryExhausted(Unavailable):
    """An answer could not be finished: its context did not fit into host memory."""
