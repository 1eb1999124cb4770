"""Builds an engine from a Config. Raises early whatever can be checked now; weights are read in the
engine thread."""

from __future__ import annotations

import logging
import threading
import time

from luceasync.config import BUNDLED_MODEL_DIR, CacheConfig, Config
from luceasync.engine.cache_directory import (
    CacheDirectorySpec,
    directory_spec_of,
    held_bytes_of,
    limits_of,
    store_spec_of,
    warm_bytes_of,
)
from luceasync.engine.engine import LocalEngine
from luceasync.engine.load import DecodeWith, Progress, Recipe, load, speculate
from luceasync.engine.prompts import Language, PinLimit
from luceasync.errors import Unavailable
from luceasync.host_cache.arena import HostMemory
from luceasync.models.directory import model_name
from luceasync.models.files import ModelFiles
from luceasync.pipeline.capacity import num_pinnable
from luceasync.pipeline.devices import host_memory
from luceasync.pipeline.plan import Plan
from luceasync.pipeline.platform import open_platform
from luceasync.pipeline.remote.discovery import processes_of
from luceasync.pipeline.remote.fleet import Fleet
from luceasync.prefix_cache.namespace import facts_of
from luceasync.request import ANY_NAME, ModelCard
from luceasync.speculation.dflash.placement import DFlashPlacement, copied_shapes, plan_with_drafter
from luceasync.speculation.dflash.process import DraftProcessResources
from luceasync.speculation.mtp import mtp_of
from luceasync.status import BackendProcesses
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.guarded import GuardedTemplate
from luceasync.text.isolation import IsolatedTemplate
from luceasync.text.roles import TOOL, Roles
from luceasync.text.template import (
    NoTemplate,
    OwnTemplate,
    ShippedTemplate,
    StartTrial,
    Template,
    TemplateSource,
    TextParts,
    TurnBoundaries,
    wants_parts,
)
from luceasync.text.tokenizer import Tokenizer, refuse_too_long
from luceasync.text.told_tools import shows_tools, told_tools

logger = logging.getLogger(__name__)

MIN_HOST_BYTES = 256 << 20  # of pinned memory, if any is needed


def build_engine(
    config: Config,
    progress: Progress | None = None,
    *,
    model: ModelFiles | None = None,
    decode_with: DecodeWith = speculate,
) -> LocalEngine:
    """Build an engine for the configured model. Raises ConfigError.

    `progress(bytes_done, bytes_total)` is called from the engine thread while weights are read.
    `model`: the model of the config, if its headers were read already. `decode_with`: replaced by
    measurements only.
    """
    model = model or ModelFiles(config.model.model_dir)
    report, drafter = plan_with_drafter(config, model)
    plan = report.plan
    for shard in plan.here:
        open_platform(shard.device).load_ahead()
    copies = copied_shapes(config, drafter, plan.devices)
    own_template = template_of(model)
    language = language_of(config, model, plan, own_template)
    held_bytes = held_bytes_of(config.cache.cache_dir)
    limits = limits_of(config.cache, held_bytes, plan.host_bytes)
    quiet, stopping = threading.Event(), threading.Event()
    node_bytes = max(limits.memory_bytes + limits.transit_bytes, MIN_HOST_BYTES)
    host = _host_memory_of(plan, node_bytes, warm_bytes_of(limits, held_bytes), quiet)
    programs = processes_of([device.name for device in plan.devices], config.placement).programs
    transport = config.placement.ipc_transport
    fleet = Fleet(model, plan, programs, transport, node_bytes, stopping)
    draft_process = _draft_process_of(drafter, plan, config, node_bytes)
    recipe = Recipe(
        model,
        plan,
        language.tokenizer,
        drafter,
        draft_process,
        mtp_of(config, model, plan.devices, plan.precision),
        copies,
        limits,
        host,
        fleet.open_stage,
        quiet,
        _stoppable(stopping, progress),
        decode_with,
    )

    def release() -> None:
        own_template.close()
        fleet.close()
        if draft_process is not None:
            draft_process.close()
        host.close()

    def processes() -> BackendProcesses:
        found = fleet.status
        if draft_process is None:
            return found
        return BackendProcesses((*found.all, draft_process.status))

    return LocalEngine(
        language,
        lambda orders: load(recipe, orders),
        config.engine,
        _directory_spec_of(config.cache, model, plan, host),
        stopping=stopping,
        release=release,
        processes=processes,
        device_parts=_device_parts(plan),
        gpu_bytes=_gpu_bytes(plan),
        drafts_copies=bool(copies),
    )


def _host_memory_of(
    plan: Plan, node_bytes: int, warm_bytes: int, quiet: threading.Event
) -> HostMemory:
    """Memory for nodes and lanes of the shards in this process."""
    return host_memory(
        [shard.device for shard in plan.here],
        node_bytes,
        warm_bytes=warm_bytes,
        quiet=quiet,
        lanes_bytes=plan.parallel * sum(plan.lane_bytes(shard) for shard in plan.here),
    )


def _directory_spec_of(
    config: CacheConfig, model: ModelFiles, plan: Plan, host: HostMemory
) -> CacheDirectorySpec | None:
    """The model's part of the cache directory; None if there is none."""
    if (cache_dir := config.cache_dir) is None:
        return None
    return directory_spec_of(
        cache_dir,
        tuple(shard.begin for shard in plan.shards),
        model.spec.end_kinds,
        lambda: facts_of(model.weights.paths, model.spec, plan.precision, cache_dir),
        host.allocate_soon,  # the disk's readers may wait
        is_shared=config.is_shared,
        store=store_spec_of(config),
    )


def _device_parts(plan: Plan) -> dict[str, dict[str, int]]:
    """Bytes of the target's weights and lanes by device, and the free bytes there before
    loading."""
    found: dict[str, dict[str, int]] = {}
    for device, shard in zip(plan.devices, plan.shards, strict=True):
        nothing = {"weights": 0, "lanes": 0, "free_before": device.free_bytes}
        parts = found.setdefault(shard.device, nothing)
        parts["weights"] += shard.weight_bytes
        parts["lanes"] += plan.parallel * plan.lane_bytes(shard)
    return found


def _gpu_bytes(plan: Plan) -> int:
    """Bytes of the target's weights and lanes on devices with memory of their own."""
    placed = zip(plan.devices, plan.shards, strict=True)
    shards = [shard for device, shard in placed if device.runs_async]
    return sum(shard.weight_bytes + plan.parallel * plan.lane_bytes(shard) for shard in shards)


def _draft_process_of(
    drafter: DFlashPlacement | None, plan: Plan, config: Config, node_bytes: int
) -> DraftProcessResources | None:
    """The resources of a drafter's process; None if there is no such process."""
    if drafter is None or drafter.program is None:
        return None
    transport = config.placement.ipc_transport
    return DraftProcessResources(drafter, drafter.program, plan, transport, node_bytes)


def _stoppable(stopping: threading.Event, progress: Progress | None) -> Progress:
    """`progress`, which also raises Unavailable once the server is shutting down."""

    def advance(done: int, total: int) -> None:
        if stopping.is_set():
            raise Unavailable("The server is shutting down.")
        if progress is not None:
            progress(done, total)

    return advance


def template_of(model: ModelFiles) -> OwnTemplate:
    """The model's own chat template; in a separate process, unless it comes with luceasync. Raises
    ModelError.
    """
    source = TemplateSource.find(model.path, model.gguf)
    if source is None:
        return NoTemplate()
    # A renderer in another process takes as long to reach as everything else before the prompt.
    return (ShippedTemplate if model.path == BUNDLED_MODEL_DIR else IsolatedTemplate)(source)


def language_of(
    config: Config, model: ModelFiles, plan: Plan, own_template: OwnTemplate
) -> Language:
    """The text side of the configured model. Messages cannot forge turns unless special tokens are
    trusted. Raises ModelError."""
    spec = model.spec
    named = [name for name in config.model.names if name != ANY_NAME]
    own = named[0] if named else model_name(model.path)
    tokenizer = Tokenizer.load(model.path, model.gguf)
    template: Template = own_template
    tried: Template = StartTrial(own_template, model.path)
    if wants_parts(tried):
        template, tried = TextParts(template), TextParts(tried)
    tells_tools = not shows_tools(tried)
    if tells_tools:
        shows_calls = AnswerFormat.of(tried, tokenizer).calls is not None
        template, tried = (told_tools(each, shows_calls=shows_calls) for each in (template, tried))
    answers = AnswerFormat.of(
        tried, tokenizer, config.model.reasoning_format, config.model.tool_format
    )
    source = own_template.source
    _log_formats(answers, has_template=source is not None, tells_tools=tells_tools)
    return Language(
        card=ModelCard(
            name=own,
            created=int(time.time()),
            max_ctx_tokens=plan.max_ctx_tokens,
            num_parameters=spec.num_parameters,
            family=spec.family,
            aliases=tuple(name for name in config.model.names if name != own),
            reasons=plan.reasons,
            special_tokens=source.special_tokens if source else {},
            chat_template=source.default if source else "",
            takes_chats=source is not None,
            fills_in=tokenizer.infill is not None,
            tool_format=answers.calls.name if answers.calls else "",
            tells_tools=tells_tools,
            thinks=answers.reasons,
        ),
        tokenizer=tokenizer,
        template=template
        if config.model.trust_special_tokens
        else GuardedTemplate(
            template,
            tokenizer,
            lambda text: refuse_too_long(tokenizer, text, plan.max_ctx_tokens, param="messages"),
        ),
        vocab_size=spec.vocab_size,
        num_lanes=plan.parallel,
        pin_limit=None
        if plan.pool is None
        else PinLimit(num_pinnable(plan.num_pages, plan.batch_tokens), plan.pool.pins),
        answers=answers,
        roles=Roles.of(tried),
        tool_roles=Roles.of(tried, [TOOL]),
        turns=TurnBoundaries.of(tried, tokenizer),
        renders_here=own_template.is_here,
    )


def _log_formats(answers: AnswerFormat, *, has_template: bool, tells_tools: bool) -> None:
    """Log what was learned from the chat template."""
    if not has_template:
        logger.warning("The model has no chat template: only /v1/completions is served.")
    elif tells_tools:
        logger.info(
            "The chat template shows no tools: they are described in the system message, and calls "
            "are written as %s.",
            answers.calls.name if answers.calls else "text",
        )
    elif answers.calls is not None:
        logger.info("The chat template writes tool calls as %s.", answers.calls.name)
    else:
        logger.warning("The chat template shows no known format of tool calls: they stay text.")
