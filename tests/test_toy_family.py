"""A family with a kind of layer of its own, made here: nothing else has to know of it.

The layer adds to each row the mean of all rows so far and the very first of them: so it keeps rows
of tokens, which lie in pages, and a sum and a count, which belong to the end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from luceasync.kv.state import StateTensor
from luceasync.models.families import FAMILIES
from luceasync.models.families.family import ConfigFields, Family
from luceasync.models.feed_forward.dense import DenseSpec
from luceasync.models.files import ModelFiles, read_spec
from luceasync.models.layer_reader import LayerReader
from luceasync.models.mixers.mixer import State
from luceasync.models.ops import Norm
from luceasync.models.pass_rows import NO_LANE, Paths, Rows
from luceasync.models.precision import Precision
from luceasync.models.spec import LayerSpec, ModelSpec
from luceasync.models.trees import Trees
from luceasync.models.weights import Weight
from luceasync.pipeline.backend import LayerSplitBackend
from luceasync.pipeline.offer import offer_of
from luceasync.pipeline.plan import make_plan
from luceasync.server_config import ServerConfig
from tests import tiny
from tests.engines import ask, running, written

HIDDEN, WIDTH, INNER, NUM_LAYERS = 32, 24, 48, 6
ENDS = ("embed_tokens.weight", "lm_head.weight")
NUM_SPELLED = 256
QUESTION = "to be or not to be, that is the question. " * 8


# --- the kind of layer --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeanSpec:
    """A Mixer of rows of `width` numbers."""

    width: int

    @property
    def rows(self) -> tuple[StateTensor, ...]:
        return (StateTensor("toy_row", (self.width,), "kv"),)

    @property
    def end(self) -> tuple[StateTensor, ...]:
        return StateTensor("toy_sum", (self.width,), "float32"), StateTensor("toy_n", (), "float32")

    @property
    def scratch(self) -> tuple[StateTensor, ...]:
        return self.rows

    @property
    def verified_row_bytes(self) -> int:
        return 0

    @property
    def recent(self) -> None:
        return None

    @property
    def reach(self) -> int:
        return 1

    def tensors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        return {
            "mean.in.weight": (self.width, hidden_size),
            "mean.out.weight": (hidden_size, self.width),
            "mean.norm.weight": (hidden_size,),
        }

    def load(self, reader: LayerReader) -> MeanLayer:
        return MeanLayer(
            MeanBody(),
            reader.norm("mean.norm.weight"),
            reader.matrix("mean.in.weight"),
            reader.matrix("mean.out.weight"),
        )

    def torch_body(self) -> MeanBody:
        return MeanBody()

    triton_body = torch_body
    compiled_body = torch_body


class MeanBody:
    """See luceasync.models.mixers.mixer.MixerBody."""

    def prepare(self, positions: Tensor) -> Tensor:
        return positions

    def mix(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        """x: [entries, rows, width]."""
        cells, sums, counts = state
        out = torch.zeros_like(x)
        for i, entry in enumerate(rows.entries):
            if entry.lane == NO_LANE:
                continue
            cells[entry.lane, entry.write] = x[i]
            assert counts[entry.lane] == entry.begin, "the lane stands where the rows begin"
            totals = sums[entry.lane] + x[i].float().cumsum(0)
            seen = counts[entry.lane] + torch.arange(1, len(x[i]) + 1)
            out[i] = (totals / seen[:, None]).to(x.dtype) + cells[entry.lane, entry.read][0]
            sums[entry.lane], counts[entry.lane] = totals[-1], seen[-1]
            if rows.mark is not None:
                sums[NO_LANE], counts[NO_LANE] = totals[rows.mark - 1], seen[rows.mark - 1]
        return out

    def mix_tree(self, x: Tensor, state: State, rows: Rows, trees: Trees, kept: State) -> Tensor:
        cells, sums, counts = state
        kept[0].copy_(x)
        out = torch.zeros_like(x)
        for i, entry in enumerate(rows.entries):
            if entry.lane == NO_LANE:
                continue
            totals = sums[entry.lane] + trees.ancestors[i].float() @ x[i].float()
            seen = counts[entry.lane] + trees.depths[i] + 1
            first = cells[entry.lane, entry.read][0] if entry.begin else x[i, 0]
            out[i] = (totals / seen[:, None]).to(x.dtype) + first
        return out

    def commit(self, scratch: State, state: State, paths: Paths) -> None:
        cells, sums, counts = state
        for kept in paths.kept:
            rows = scratch[0][:, kept.entry, kept.rows]  # [layers, rows, width]
            cells[:, kept.lane, kept.places] = rows
            sums[:, kept.lane] += rows.float().sum(1)
            counts[:, kept.lane] += len(kept.rows)


@dataclass(frozen=True, slots=True)
class MeanLayer:
    """See luceasync.models.mixers.mixer.MixerLayer."""

    body: MeanBody
    norm: Norm
    into: Weight
    out: Weight

    @property
    def num_bytes(self) -> int:
        return self.norm.num_bytes + self.into.num_bytes + self.out.num_bytes

    def forward(self, x: Tensor, state: State, rows: Rows) -> Tensor:
        mixed = self.body.mix(self.into.linear(self.norm(x)), state, rows)
        return self.out.linear_add(mixed, x)

    def verify(self, x: Tensor, state: State, rows: Rows, trees: Trees, scratch: State) -> Tensor:
        mixed = self.body.mix_tree(self.into.linear(self.norm(x)), state, rows, trees, scratch)
        return self.out.linear_add(mixed, x)


# --- the family ---------------------------------------------------------------------------------


def parse(fields: ConfigFields) -> ModelSpec:
    layer = LayerSpec(MeanSpec(fields.positive("width")), DenseSpec(fields.positive("inner")))
    return ModelSpec(
        family="toy",
        prefix="",
        vocab_size=fields.positive("vocab_size"),
        hidden_size=fields.positive("hidden_size"),
        layers=(layer,) * fields.positive("num_hidden_layers"),
        norm_eps=1e-6,
        norm_offset=0.0,
        tied_embeddings=False,
        max_positions=2048,
        eos_ids=frozenset({2}),
    )


class Checkpoint:
    """Random weights that write themselves as a model of transformers does."""

    def save_pretrained(self, folder: Path) -> None:
        sizes = {"vocab_size": tiny.VOCAB_SIZE, "hidden_size": HIDDEN, "width": WIDTH}
        layers = {"inner": INNER, "num_hidden_layers": NUM_LAYERS}
        config = {"model_type": "toy", **sizes, **layers}
        (folder / "config.json").write_text(json.dumps(config))
        spec, random = parse(ConfigFields(config)), torch.Generator().manual_seed(3)
        table = (tiny.VOCAB_SIZE, HIDDEN)
        shapes = {"embed_tokens.weight": table, "lm_head.weight": table, "norm.weight": (HIDDEN,)}
        for layer in range(spec.num_layers):
            named = spec.layer_shapes(layer).items()
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in named}
        tensors = {
            name: torch.randn(shape, generator=random) * (1.0 if name in ENDS else 0.1)
            for name, shape in shapes.items()
        }
        tensors |= {name: 1 + tensors[name] for name in shapes if "norm" in name}
        tensors["lm_head.weight"][NUM_SPELLED:] = 0  # ids that no text has
        save_file(tensors, folder / "model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def family() -> Iterator[None]:
    """A row of the table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "toy", Family("toy", parse))
        yield


@pytest.fixture(scope="module")
def model_dir(family: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(Checkpoint(), tmp_path_factory.mktemp("toy"))


# --- what it is then ----------------------------------------------------------------------------


def open_backend(model_dir: Path, num_shards: int = 1, **sizes: object) -> LayerSplitBackend:
    spec = read_spec(model_dir)
    plan = make_plan(
        spec,
        [offer_of(f"cpu:{i}", 2**33) for i in range(num_shards)],
        precision=Precision.of("fp32"),
        weights=None,
        parallel=2,
        max_ctx_tokens=256,
        prefill_chunk_tokens=64,
        **sizes,
    )
    return LayerSplitBackend.open(ModelFiles(model_dir), plan)


def decoded(backend: LayerSplitBackend, prompt: list[int], num_tokens: int = 12) -> list[int]:
    logits = backend.prefill(0, 0, prompt, project=True)
    tokens = [int(logits.argmax())]
    for i in range(num_tokens - 1):
        logits = backend.decode([0], [len(prompt) + i], tokens[-1:]).whole()
        tokens.append(int(logits[0].argmax()))
    return tokens


PROMPT = [(7 * i) % 500 + 3 for i in range(70)]


def test_its_bytes_are_planned(model_dir: Path):
    backend = open_backend(model_dir)
    shard = backend.plan.shards[0]
    assert shard.token_bytes == NUM_LAYERS * WIDTH * 4
    assert shard.lane_state_bytes == NUM_LAYERS * (WIDTH + 1) * 4
    assert shard.weight_bytes == (model_dir / "model.safetensors").stat().st_size // 8 * 8 - header(
        model_dir
    )
    backend.close()


def header(model_dir: Path) -> int:
    """Bytes of the weight file before its numbers, in whole eights."""
    with open(model_dir / "model.safetensors", "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def test_any_split_decodes_the_same(model_dir: Path):
    answers = []
    for num_shards in (1, 3):
        backend = open_backend(model_dir, num_shards)
        answers.append(decoded(backend, PROMPT))
        backend.close()
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 1, "an answer that depends on its tokens"


def test_a_proposal_is_verified_and_committed_as_it_decodes(model_dir: Path):
    backend = open_backend(model_dir, 3, verify_rows=(4,))
    expected = decoded(backend, PROMPT)
    backend.reset(0)
    backend.prefill(0, 0, PROMPT, project=False)
    rows = torch.tensor([[*expected[:3], 0]])  # the last one is wrong
    logits = backend.verify([0], [len(PROMPT)], rows).whole()
    assert logits[0, :3].argmax(-1).tolist() == expected[1:4]
    backend.commit([[0, 1, 2]])
    after = backend.decode([0], [len(PROMPT) + 3], [expected[3]]).whole()
    assert int(after[0].argmax()) == expected[4]
    backend.close()


@pytest.mark.slow
async def test_it_is_kept_and_taken_up_after_a_restart_under_another_split(
    model_dir: Path, tmp_path: Path
):
    async with running(model_dir, tmp_path, shards=3) as engine:
        cold = await ask(engine, QUESTION, keep_prefix=True)
        warm = await ask(engine, QUESTION)
        await written(engine)
    assert warm.finish.restore.tier == "memory" and warm.ids == cold.ids
    for shards in (1, 3):
        async with running(model_dir, tmp_path, shards=shards) as engine:
            again = await ask(engine, QUESTION)
        assert again.finish.restore.tier == "disk"
        assert (again.num_cached, again.num_prefilled) == (cold.num_prompt_tokens, 0)
        assert again.ids == cold.ids


async def test_it_is_served(model_dir: Path):
    from luceasync.server.app import create_app

    body = {"messages": [{"role": "user", "content": "to be"}], "max_tokens": 5}
    async with running(model_dir, shards=3) as engine:
        app = create_app(engine, ServerConfig())
        transport = httpx.ASGITransport(app)
        async with (
            asyncio.timeout(60),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1
