"""The engine as the server sees it: requests in, streams out, all work in one thread of its own.

Owns the admission count, the streams and the cache directory's task. Knows no HTTP; what a step
does is the pump's business.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Self

from luceasync.config import EngineConfig
from luceasync.engine.admission import retry_after_s
from luceasync.engine.generation import Prepared
from luceasync.engine.pump import Emitted, Pump
from luceasync.engine.sampling.draws import choice_seed
from luceasync.engine.sampling.row import TokenCounts, check_logit_bias, has_penalties
from luceasync.engine.stream import LocalStream
from luceasync.engine.thread import EngineThread, Loaded
from luceasync.errors import ContextLengthError, QueueFull, RequestError, Unavailable
from luceasync.keeping.disk_orders import DiskOrders, NoDisk
from luceasync.keeping.disk_worker import DiskWorker
from luceasync.keeping.prefixes import Prefixes
from luceasync.keeping.tenants import Tenant, Tenants
from luceasync.nodefiles.disk import DiskTier
from luceasync.request import (
    CacheStatus,
    ChatPrompt,
    EngineStatus,
    ModelCard,
    Request,
    TextPrompt,
    TokenPrompt,
)
from luceasync.text.detokenizer import Detokenizer
from luceasync.text.history import History
from luceasync.text.shared import shared_ids
from luceasync.text.template import ChatTemplate, Turns
from luceasync.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

FLUSH_DEADLINE_S = 30.0
SWITCH_INTERVAL_S = 5e-4  # the default of 5 ms lets the thread's Python hold up the event loop


@dataclass(frozen=True, slots=True)
class Language:
    """The text side of a model, and the limits that a request is held against."""

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate
    vocab_size: int
    num_lanes: int


@dataclass(frozen=True, slots=True)
class Cabinet:
    """A cache directory: how to open it, and the first layer of each shard, by which tensors are
    named in it. Opening raises ConfigError where the directory cannot be used.
    """

    open: Callable[[], AbstractAsyncContextManager[DiskTier]]
    split: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request. `text` None: it was none, and nothing is remembered under it."""

    tenant: Tenant
    text: str | None
    ids: tuple[int, ...]
    boundaries: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream, and what its choices have said so far."""

    stream: LocalStream
    prompt: Prompt
    said: dict[int, array[int]] = field(default_factory=dict)


class LocalEngine:
    """An engine in this process. `async with` starts its thread and ends it.

    `load(shelf)` makes the model in the engine thread; until it is done `open` raises Unavailable.
    """

    def __init__(
        self,
        language: Language,
        load: Callable[[DiskOrders], Loaded],
        config: EngineConfig,
        cabinet: Cabinet | None = None,
    ) -> None:
        self._language = language
        self._load = load
        self._max_queue = config.max_queue
        self._cabinet = cabinet
        self._turns = Turns.of(language.template, language.tokenizer)
        self._tenants = Tenants(lambda: History(language.tokenizer))
        self._answers: dict[int, Answer] = {}
        self._ids = itertools.count()
        self._num_admitted = 0  # choices that were submitted and have not finished
        self._mean_request_s = 1.0
        self._detail = "loading the model"
        self._pump: Pump | None = None
        self._thread: EngineThread | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._shelf: DiskWorker | None = None
        self._disk: DiskTier | None = None
        self._disk_task: asyncio.Task[None] | None = None
        self._disk_opened: asyncio.Future[None] | None = None

    # --- life ----------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._loaded, self._disk_opened = loop.create_future(), loop.create_future()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        shelf: DiskOrders = NoDisk()
        if self._cabinet is not None:
            shelf = self._shelf = DiskWorker(self._cabinet.split, self._tell)
        self._thread = EngineThread(lambda: self._load(shelf), self)
        self._thread.start()
        self._disk_task = asyncio.create_task(self._keep_disk())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._detail = "the server is shutting down"
        assert self._thread is not None and self._disk_task is not None
        if self._pump is not None:
            await self._flush()
        self._disk_task.cancel()
        await asyncio.wait([self._disk_task])
        await self._thread.join()

    async def load(self) -> None:
        """Wait until the model is loaded and the cache directory is known. Raises what one of them
        raised, at once.
        """
        assert self._loaded is not None and self._disk_opened is not None, "use `async with`"
        await asyncio.gather(asyncio.shield(self._loaded), asyncio.shield(self._disk_opened))

    def _tell_ready(self) -> None:
        """Both the model and the cache directory have to be there."""
        assert self._loaded is not None and self._disk_opened is not None
        if self._loaded.done() and self._disk_opened.done():
            self._detail = ""

    async def _flush(self) -> None:
        """End what runs, and let what is worth it reach the disk."""
        assert self._thread is not None
        try:
            await self._thread.call(
                lambda pump: pump.end_all("the server is shutting down"), FLUSH_DEADLINE_S
            )
            if self._shelf is not None:
                await self._shelf.drain(FLUSH_DEADLINE_S)
        except TimeoutError:
            log.error("the engine did not end its work within %.0f s", FLUSH_DEADLINE_S)

    async def _keep_disk(self) -> None:
        """The task of the cache directory, for as long as the engine lives."""
        assert self._disk_opened is not None
        if self._cabinet is None or self._shelf is None:
            self._disk_opened.set_result(None)
            self._tell_ready()
            return
        try:
            async with self._cabinet.open() as disk:
                self._tenants.found(await self._shelf.scan(disk))
                await asyncio.to_thread(self._tenants.get, "")  # so that its first prompt is fast
                self._disk = disk
                self._disk_opened.set_result(None)
                self._tell_ready()
                await self._shelf.serve(disk)
        except Exception as error:
            if self._disk_opened.done():
                raise
            self._detail = str(error)
            self._disk_opened.set_exception(error)

    # --- requests ------------------------------------------------------------------------------

    @property
    def card(self) -> ModelCard:
        return self._language.card

    def status(self) -> EngineStatus:
        pump = self._pump
        return EngineStatus(
            ready=self._is_ready,
            detail=self._detail or "ready",
            num_lanes=self._language.num_lanes,
            num_running=pump.num_running if pump else 0,
            num_queued=pump.num_waiting if pump else 0,
            prefilled_tokens_total=pump.num_prefilled_total if pump else 0,
            decoded_tokens_total=pump.num_decoded_total if pump else 0,
            decode_steps_total=pump.num_steps_total if pump else 0,
            cache=self._cache_status(pump) if pump else None,
            speculation=pump.decoding.status if pump else None,
        )

    @property
    def _is_ready(self) -> bool:
        return self._pump is not None and not self._detail

    def _cache_status(self, pump: Pump) -> CacheStatus:
        status = pump.prefixes.status
        if self._shelf is None or self._disk is None:
            return status
        return self._shelf.described(status, self._disk)

    async def open(self, request: Request) -> LocalStream:
        """See luceasync.request.Engine."""
        self._check_open(request)
        prompt = await asyncio.to_thread(self._render, request)
        self._check_open(request)  # others may have come in between
        stream_id = next(self._ids)
        choices = self._prepare(stream_id, request, prompt)
        stream = LocalStream(len(prompt.ids), len(choices), lambda: self._cancel(stream_id))
        self._answers[stream_id] = Answer(stream, prompt)
        self._num_admitted += len(choices)
        assert self._thread is not None
        self._thread.post(lambda pump: pump.submit(choices) or [])
        return stream

    def _check_open(self, request: Request) -> None:
        if not self._is_ready:
            raise Unavailable(f"The model is not available: {self._detail}.")
        num_lanes = self._language.num_lanes
        if self._num_admitted + request.num_choices > num_lanes + self._max_queue:
            num_queued = max(0, self._num_admitted - num_lanes)
            wait_s = retry_after_s(num_lanes, self._mean_request_s)
            raise QueueFull(num_queued, wait_s)

    def _render(self, request: Request) -> Prompt:
        tenant, param = self._tenants.get(request.tenant), request.prompt.param
        match request.prompt:
            case ChatPrompt() as chat if _is_beginning(request, chat):
                prompt = self._prefix(tenant, chat)
            case ChatPrompt(messages, tools, template_kwargs):
                text = self._language.template.render(messages, tools, **template_kwargs)
                prompt = self._of_text(tenant, text)
            case TextPrompt(text):
                prompt = self._of_text(tenant, text)
            case TokenPrompt(ids):
                prompt = self._of_ids(tenant, ids)
        max_ctx = self._language.card.max_ctx_tokens
        if len(prompt.ids) >= max_ctx:
            raise ContextLengthError(max_ctx, len(prompt.ids), param)
        if not prompt.ids:
            raise RequestError(f"{param}: the rendered prompt is empty", param=param)
        return prompt

    def _of_text(self, tenant: Tenant, text: str) -> Prompt:
        ids = tuple(tenant.history.recall(text))
        return Prompt(tenant, text, ids, tuple(self._turns.ends(ids)))

    def _of_ids(self, tenant: Tenant, ids: tuple[int, ...]) -> Prompt:
        """Ids as they came. Nothing is remembered of them: a text has the ids that we gave it, not
        those that a client thought of.
        """
        vocab_size = self._language.vocab_size
        for place, token_id in enumerate(ids):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt[{place}] is token {token_id}; the tokens are 0 to {vocab_size - 1}.",
                    param="prompt",
                )
        return Prompt(tenant, None, ids, tuple(self._turns.ends(ids)))

    def _prefix(self, tenant: Tenant, chat: ChatPrompt) -> Prompt:
        """What the prompts share that go on from the messages; no text of its own comes back."""
        ids = shared_ids(
            self._language.template,
            self._turns,
            tenant.history.recall,
            chat.messages,
            chat.tools,
            chat.template_kwargs,
        )
        return Prompt(tenant, None, tuple(ids), (*self._turns.ends(ids), len(ids)))

    def _prepare(self, stream_id: int, request: Request, prompt: Prompt) -> list[Prepared]:
        language, sampling = self._language, request.sampling
        check_logit_bias(sampling, language.vocab_size)
        room = language.card.max_ctx_tokens - len(prompt.ids)
        seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        return [
            Prepared(
                stream_id=stream_id,
                index=index,
                prompt_ids=prompt.ids,
                max_tokens=room if request.max_tokens is None else min(room, request.max_tokens),
                stop_ids=frozenset() if request.ignore_eos else language.tokenizer.eos_ids,
                sampling=sampling,
                seed=choice_seed(seed, index),
                counts=TokenCounts(prompt.ids) if has_penalties(sampling) else None,
                top_logprobs=request.top_logprobs,
                tokenizer=language.tokenizer,
                detokenizer=Detokenizer(language.tokenizer, request.stop),
                tenant=prompt.tenant.key,
                boundaries=prompt.boundaries,
                keep_prompt=request.keep_prefix,
            )
            for index in range(request.num_choices)
        ]

    def _cancel(self, stream_id: int) -> None:
        assert self._thread is not None
        self._thread.post(lambda pump: pump.cancel(stream_id))

    def _tell(self, outcome: Callable[[Prefixes], None]) -> None:
        """An outcome of the disk for the engine's thread."""
        assert self._thread is not None
        self._thread.post(lambda pump: outcome(pump.prefixes) or [])

    # --- from the engine's thread: see luceasync.engine.thread.Listener ------------------------

    def deliver(self, emitted: Sequence[Emitted]) -> None:
        """Hand deltas to their streams."""
        for stream_id, delta in emitted:
            answer = self._answers[stream_id]
            answer.stream.push(delta)
            said = answer.said.setdefault(delta.index, array("i"))
            said.extend(delta.token_ids)
            if delta.finish is None:
                continue
            prompt = answer.prompt
            if prompt.text is not None:
                prompt.tenant.history.remember(prompt.text, prompt.ids, said)
            self._num_admitted -= 1
            timings = delta.finish.timings
            self._mean_request_s += 0.1 * (
                timings.prefill_s + timings.decode_s - self._mean_request_s
            )
            if answer.stream.num_open == 0:
                del self._answers[stream_id]

    def loaded(self, pump: Pump | None, error: BaseException | None) -> None:
        """The model is there, or it will never be."""
        assert self._loaded is not None
        self._pump = pump
        if error is None:
            self._loaded.set_result(None)
            self._tell_ready()
        else:
            self._detail = str(error)
            self._loaded.set_exception(error)

    def failed(self, detail: str) -> None:
        """The engine will never do anything again."""
        self._detail = detail


def _is_beginning(request: Request, chat: ChatPrompt) -> bool:
    """Whether the messages are only to be kept and a user's turn comes next, not an answer."""
    is_answered = bool(chat.messages) and chat.messages[-1]["role"] in ("user", "tool")
    return request.keep_prefix and request.max_tokens == 0 and not is_answered
