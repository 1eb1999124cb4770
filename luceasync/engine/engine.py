"""The engine as the server sees it: requests in, streams out, all work in one thread of its own.

Owns the thread, the admission count and the way between the event loop and the thread. Knows no
HTTP; what a step does is the pump's business.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import secrets
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from luceasync.config import EngineConfig
from luceasync.engine.admission import retry_after_s
from luceasync.engine.generation import Prepared
from luceasync.engine.pump import Emitted, Pump
from luceasync.engine.sampler import TokenCounts, check_logit_bias, choice_seed, has_penalties
from luceasync.engine.stream import LocalStream
from luceasync.errors import (
    ContextLengthError,
    LuceasyncError,
    QueueFull,
    RequestError,
    Unavailable,
)
from luceasync.request import EngineStatus, ModelCard, Request
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # how long the thread sleeps before it looks whether it should end
JOIN_DEADLINE_S = 30.0
SWITCH_INTERVAL_S = 5e-4  # the default of 5 ms lets the thread's Python hold up the event loop


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model: the pump over it, and how to free it."""

    pump: Pump
    close: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Language:
    """The text side of a model, and the limits that a request is held against."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    num_lanes: int


Command = Callable[[Pump], list[Emitted]]
Progress = Callable[[int, int], None]


class LocalEngine:
    """An engine in this process. `async with` starts its thread and ends it.

    `load(progress)` makes the model in the engine thread; until it is done `open` raises
    Unavailable.
    """

    def __init__(
        self,
        language: Language,
        load: Callable[[], Loaded],
        config: EngineConfig,
    ) -> None:
        self._language = language
        self._load = load
        self._max_queue = config.max_queue
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._streams: dict[int, LocalStream] = {}
        self._ids = itertools.count()
        self._num_admitted = 0  # choices that were submitted and have not finished
        self._mean_request_s = 1.0
        self._detail = "loading the model"
        self._pump: Pump | None = None
        self._thread: threading.Thread | None = None
        self._loaded: asyncio.Future[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._loaded = loop.create_future()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread = threading.Thread(target=self._run, args=(loop,), name="engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._detail = "the server is shutting down"
        self._commands.put(None)
        assert self._thread is not None
        await asyncio.to_thread(self._thread.join, JOIN_DEADLINE_S)
        if self._thread.is_alive():
            log.error("the engine thread did not end within %.0f s", JOIN_DEADLINE_S)

    async def load(self) -> None:
        """Wait until the model is loaded. Raises what loading raised."""
        assert self._loaded is not None, "the engine is not running: use `async with`"
        await asyncio.shield(self._loaded)

    # --- requests ------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        return self._language.card

    def status(self) -> EngineStatus:
        pump = self._pump
        return EngineStatus(
            ready=pump is not None and not self._detail,
            detail=self._detail or "ready",
            num_lanes=self._language.num_lanes,
            num_running=pump.num_running if pump else 0,
            num_queued=pump.num_waiting if pump else 0,
            prefilled_tokens_total=pump.num_prefilled_total if pump else 0,
            decoded_tokens_total=pump.num_decoded_total if pump else 0,
            decode_steps_total=pump.num_steps_total if pump else 0,
        )

    async def open(self, request: Request) -> LocalStream:
        """See luceasync.request.Engine."""
        self._check_open(request)
        prompt_ids = await asyncio.to_thread(self._tokenize, request)
        self._check_open(request)  # others may have come in between
        stream_id = next(self._ids)
        choices = self._prepare(stream_id, request, prompt_ids)
        stream = LocalStream(len(prompt_ids), len(choices), lambda: self._cancel(stream_id))
        self._streams[stream_id] = stream
        self._num_admitted += len(choices)
        self._commands.put(lambda pump: pump.submit(choices) or [])
        return stream

    def _check_open(self, request: Request) -> None:
        if not self.status().ready:
            raise Unavailable(f"The model is not available: {self._detail}.")
        num_lanes = self._language.num_lanes
        if self._num_admitted + request.num_choices > num_lanes + self._max_queue:
            num_queued = max(0, self._num_admitted - num_lanes)
            wait_s = retry_after_s(num_lanes, self._mean_request_s)
            raise QueueFull(num_queued, wait_s)

    def _tokenize(self, request: Request) -> tuple[int, ...]:
        language = self._language
        text = language.template.render(request.messages, request.tools, **request.template_kwargs)
        ids = tuple(language.tokenizer.encode(text))
        max_ctx = language.card.max_ctx_tokens
        if len(ids) >= max_ctx:
            raise ContextLengthError(max_ctx, len(ids))
        if not ids:
            raise RequestError("messages: the rendered prompt is empty", param="messages")
        return ids

    def _prepare(
        self, stream_id: int, request: Request, prompt_ids: tuple[int, ...]
    ) -> list[Prepared]:
        language, sampling = self._language, request.sampling
        check_logit_bias(sampling, language.vocab_size)
        room = language.card.max_ctx_tokens - len(prompt_ids)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return [
            Prepared(
                stream_id=stream_id,
                index=index,
                prompt_ids=prompt_ids,
                max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
                stop_ids=frozenset() if request.ignore_eos else language.tokenizer.eos_ids,
                sampling=sampling,
                seed=choice_seed(seed, index),
                counts=TokenCounts(prompt_ids) if has_penalties(sampling) else None,
                top_logprobs=request.top_logprobs,
                tokenizer=language.tokenizer,
                detokenizer=Detokenizer(language.tokenizer, request.stop),
            )
            for index in range(request.num_choices)
        ]

    def _cancel(self, stream_id: int) -> None:
        self._commands.put(lambda pump: pump.cancel(stream_id))

    def _deliver(self, emitted: list[Emitted]) -> None:
        """On the event loop: hand deltas to their streams."""
        for stream_id, delta in emitted:
            stream = self._streams[stream_id]
            stream.push(delta)
            if delta.finish is None:
                continue
            self._num_admitted -= 1
            timings = delta.finish.timings
            self._mean_request_s += 0.1 * (
                timings.prefill_s + timings.decode_s - self._mean_request_s
            )
            if stream.num_open == 0:
                del self._streams[stream_id]

    def _set_loaded(self, pump: Pump | None, error: BaseException | None) -> None:
        """On the event loop: the model is there, or it will never be."""
        assert self._loaded is not None
        self._pump = pump
        self._detail = "" if error is None else str(error)
        if error is None:
            self._loaded.set_result(None)
        else:
            self._loaded.set_exception(error)

    def _set_failed(self, detail: str) -> None:
        self._detail = detail

    # --- the engine thread ---------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loaded = self._load()
        except Exception as error:
            if not isinstance(error, LuceasyncError):
                log.exception("loading the model failed")
            _post(loop, self._set_loaded, None, error)
            return
        _post(loop, self._set_loaded, loaded.pump, None)
        try:
            self._pump_until_stopped(loop, loaded.pump)
        except Exception as error:
            log.exception("the engine failed")
            detail = f"the engine failed: {type(error).__name__}: {error}"
            _post(loop, self._set_failed, detail)
            _post(loop, self._deliver, loaded.pump.fail_all(detail))
            self._refuse_until_stopped(loop, loaded.pump, detail)
        finally:
            loaded.close()

    def _pump_until_stopped(self, loop: asyncio.AbstractEventLoop, pump: Pump) -> None:
        while True:
            command = self._next_command(wait=pump.is_idle)
            if command is _STOP:
                _post(loop, self._deliver, pump.fail_all("the server is shutting down"))
                return
            emitted = pump.step() if command is None else command(pump)
            if emitted:
                _post(loop, self._deliver, emitted)

    def _refuse_until_stopped(
        self, loop: asyncio.AbstractEventLoop, pump: Pump, detail: str
    ) -> None:
        """Requests that were on their way when the engine failed get the same answer."""
        while (command := self._next_command(wait=True)) is not _STOP:
            if command is not None:
                command(pump)
                _post(loop, self._deliver, pump.fail_all(detail))

    def _next_command(self, *, wait: bool) -> Command | None:
        """The next command; None: there is none, go on; _STOP: end."""
        try:
            command = (
                self._commands.get(timeout=IDLE_WAIT_S) if wait else self._commands.get_nowait()
            )
        except queue.Empty:
            return None
        return _STOP if command is None else command


def _stop(pump: Pump) -> list[Emitted]:
    raise AssertionError("a mark, never called")


_STOP: Command = _stop


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    """Run `call` on the loop; a loop that is gone has nobody left to tell."""
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        log.debug("the event loop is closed; %s was not delivered", call.__name__)
