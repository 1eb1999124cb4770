"""From a Config to an engine: spec, plan, tokenizer and template now, weights in the engine
thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from luceasync.config import Config
from luceasync.engine.engine import Language, Loaded, LocalEngine
from luceasync.engine.pump import Pump
from luceasync.models.spec import ModelSpec, read_spec
from luceasync.request import ModelCard
from luceasync.target.backend import LayerSplitBackend
from luceasync.target.plan import Plan
from luceasync.target.report import plan_model
from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer


def build_engine(config: Config, progress: Callable[[int, int], None] | None = None) -> LocalEngine:
    """An engine for the configured model; everything that can be refused now is refused now.

    `progress(bytes_done, bytes_total)` is called from the engine thread while weights are read.
    Raises ConfigError.
    """
    model_dir = config.model.model_dir
    spec = read_spec(model_dir)
    plan = plan_model(spec, config)
    tokenizer = Tokenizer.load(model_dir)
    language = Language(
        card=ModelCard(
            name=config.model.name or model_dir.resolve().name,
            created=int(time.time()),
            max_ctx_tokens=plan.max_ctx_tokens,
            num_parameters=spec.num_parameters,
            family=spec.family,
        ),
        tokenizer=tokenizer,
        template=ChatTemplate.load(model_dir),
        vocab_size=spec.vocab_size,
        num_lanes=plan.parallel,
    )
    return LocalEngine(language, lambda: _load(model_dir, spec, plan, progress), config.engine)


def _load(
    model_dir: Path,
    spec: ModelSpec,
    plan: Plan,
    progress: Callable[[int, int], None] | None,
) -> Loaded:
    """Read the weights; runs in the engine thread."""
    total = sum(shard.weight_bytes for shard in plan.shards)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(min(done, total), total)

    if plan.is_small_on_cpu:
        # Measured with the bundled model and 16 streams on 2 cores: almost three times the tokens.
        torch.set_num_threads(1)  # of this thread, which is the engine's
    backend = LayerSplitBackend.open(model_dir, spec, plan, advance)
    if progress is not None:
        progress(total, total)
    pump = Pump(backend, num_lanes=plan.parallel, chunk_tokens=plan.prefill_chunk_tokens)
    return Loaded(pump, backend.close)
