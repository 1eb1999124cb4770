"""A server as `luceasync serve` makes it, over a tiny model with scripted answers.

    python -m tests.acceptance.clients.serve FOLDER --port 8123 [--bundled | --model DIR]

Only the choice of tokens is scripted: template, tokens, prefill, lanes, disk cache and answers are
real. With another model nothing is. Each request and its answer is a line of FOLDER/requests.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop

from luceasync.config import (
    BUNDLED_MODEL_DIR,
    CacheConfig,
    Config,
    DraftConfig,
    EngineConfig,
    ModelConfig,
)
from luceasync.engine import decoding, steps
from luceasync.engine.sampling.choose import nothing
from luceasync.engine.sampling.row import RowSampling
from luceasync.engine.sequence import Generation
from luceasync.engine.start import build_engine
from luceasync.ranking.logits import Logits
from luceasync.server.app import create_app
from luceasync.server.serve import serve
from luceasync.server_config import ServerConfig
from tests.acceptance.clients.record import Recorder
from tests.acceptance.clients.script import WRITERS, WriteCall, answer
from tests.chosen import choose

MODEL = "luce"
MAX_CTX_TOKENS = 131072
BUNDLED_CTX_TOKENS = 8192
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": MAX_CTX_TOKENS,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "rope_parameters": {
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "rope_type": "default",
    },
}


def make_model(folder: Path, template: str) -> Path:
    """A model of random weights with recurrent layers, whose context holds what agents send."""
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL_DIR / file, folder)
    source = Path(__file__).parents[1] / "turns" / f"{template}.jinja"
    shutil.copy(source, folder / "chat_template.jinja")
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE)).save_pretrained(folder)
    return folder


class ScriptedChoice:
    """Chooses tokens in place of the sampler; logits are ranked as usual, and ignored."""

    def __init__(self, write_call: WriteCall) -> None:
        self._write_call = write_call
        self._answers: dict[Generation, list[int]] = {}

    def __call__(
        self,
        generations: Sequence[Generation],
        logits: Logits,
        meanwhile: Callable[[], None] = nothing,
    ) -> None:
        rows = [_row(g) for g in generations]
        heard = choose(logits, rows, meanwhile=meanwhile)
        told = zip(generations, rows, heard.token_ids, heard.logprobs, strict=True)
        for generation, row, token, logprobs in told:
            ids = self._answers.setdefault(generation, [])
            if not generation.num_generated:
                ids[:] = self._answer(generation)
            if generation.num_generated < len(ids):  # else it goes on after its end
                token = self._said(ids, generation.num_generated, row, token)
            if not generation.append(token, logprobs):
                del self._answers[generation]

    @staticmethod
    def _said(ids: list[int], place: int, row: RowSampling, heard: int) -> int:
        """The script's token, or the end if that token may not come."""
        if row.mask is None or row.mask[ids[place] // 32] >> (ids[place] % 32) & 1:
            return ids[place]
        del ids[place:]
        return heard

    def _answer(self, generation: Generation) -> list[int]:
        tokenizer, prepared = generation.prepared.tokenizer, generation.prepared
        spelled = b"".join(map(tokenizer.token_bytes, prepared.prompt.ids))
        said = answer(spelled.decode(errors="replace"), self._write_call)
        return [*tokenizer.encode(said), *tokenizer.eos_ids]


def _row(generation: Generation) -> RowSampling:
    guide = generation.guide
    row = generation.next_row
    return row if guide is None else replace(row, mask=guide.mask())


def choose_as(choice: ScriptedChoice) -> None:
    """Let it choose every token of this process from now on."""
    for module in (steps, decoding):
        module.choose_next = choice  # type: ignore[attr-defined]


def scripted(folder: Path, template: str) -> tuple[ModelConfig, int]:
    """A model with scripted answers, and its context."""
    choose_as(ScriptedChoice(WRITERS[template]))
    return ModelConfig(
        model_dir=make_model(folder / "model", template), names=(MODEL,)
    ), MAX_CTX_TOKENS


def bundled() -> tuple[ModelConfig, int]:
    """The bundled model, which chooses for itself."""
    return ModelConfig(names=(MODEL,)), BUNDLED_CTX_TOKENS


def chosen(folder: Path, args: argparse.Namespace) -> tuple[ModelConfig, int]:
    """The model that the flags ask for, and its context."""
    if args.model is not None:
        return ModelConfig(model_dir=args.model, names=(MODEL,), dtype="fp32"), MAX_CTX_TOKENS
    return bundled() if args.bundled else scripted(folder, args.template)


async def run(folder: Path, args: argparse.Namespace) -> None:
    """Serve until a signal."""
    model, max_ctx_tokens = chosen(folder, args)
    max_ctx_tokens = args.max_ctx or max_ctx_tokens
    config = Config(
        model=model,
        engine=EngineConfig(parallel=3, max_ctx_tokens=max_ctx_tokens),
        cache=CacheConfig(cache_dir=folder / "cache", budget_bytes=4 << 30, memory_bytes=1 << 30),
        server=ServerConfig(port=args.port),
    )
    if args.model is None and not args.bundled:  # rounds would choose tokens without the script
        config = replace(config, draft=DraftConfig(draft_dir="none"))
    engine = build_engine(config)
    async with engine:
        app = create_app(engine, config.server)
        app.add_middleware(Recorder, path=folder / "requests.jsonl")
        await serve(
            app,
            config.server,
            on_bound=lambda url: print(json.dumps({"url": url}), flush=True),
            load=engine.load,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--template", choices=WRITERS, default="qwen3.5")
    parser.add_argument("--bundled", action="store_true", help="the bundled model, no script")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a model, no script")
    parser.add_argument("--max-ctx", type=int, help="tokens of context; default: the model's")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    uvloop.install()
    asyncio.run(run(args.folder, args))


if __name__ == "__main__":
    main()
