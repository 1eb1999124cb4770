"""Products of few rows in CUDA C++ equal those of the dequantised numbers, and rows do not depend
on each other. Also compiles the program for other GPUs. A few encodings run on the CPU too.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from luceasync.kernels import kernel, prepared_rows, quant_gemv_cuda
from luceasync.kernels.cuda_program import CompileError, CudaProgram, LaunchShape, compiled
from luceasync.kernels.prepared_rows import FewRows, WeighedRows
from luceasync.kernels.quant_gemv_cuda import MAX_ROWS, constants_of
from luceasync.kernels.quant_tiling import QuantSplit, QuantWork, choose_split, shared_of
from luceasync.models import ops
from luceasync.models.quant.gpu import TiledQuantSwiGLU, TiledQuantWeight
from luceasync.models.quant.packed import DTYPES
from luceasync.models.quant.tiles import coding_of
from luceasync.models.triton_ops import TritonOps
from tests.kernels.offline import BINARIES, CARDS, KIB
from tests.kernels.places import gpu_of_nvidia, on_both
from tests.kernels.test_quant_gemv import ALL, FEW, error, matrix

CAPABILITIES = {name: int(name[3:]) for name, card in CARDS.items() if card.is_nvidia}
MOST_STACK_BYTES = 16  # of a lane: a register or two spilled
OTHERS = tuple(name for name in ALL if name not in FEW)
SPLITS = (QuantSplit(1, 4, 3), QuantSplit(2, 2, 2), QuantSplit(2, 2, 2, splits=2))
SHAPES = ((48, 384), (32, 2304))
# One of each kind of codes, scales and minimums, for the CPU, with a split and a shape each, and
# numbers of rows in turns: the programs of one row, of up to 8, of up to 16, and of more.
ANY_ROWS = (1, 2, 8, 9, 16, 17, 32, 40, 64)
EMULATED_ROWS = ((1, 9, 20), (2, 8, 16), (1, 8, 40))
EMULATED = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_1", "FP8", "MXFP4", "NVFP4", "Q5_0", "Q3_K")


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float = 1e-6


@pytest.fixture
def place(request: pytest.FixtureRequest) -> torch.device:
    """The device that programs run on."""
    if request.param == "gpu":
        return gpu_of_nvidia()
    emulate = request.getfixturevalue("emulate")
    emulate(prepared_rows, _WEIGH="weigh_rows", _ARRANGE_FEW="arrange_few", _ARRANGE="arrange_rows")
    return emulate(quant_gemv_cuda, _PRODUCT="quant_gemv")


def plain(rows: FewRows | WeighedRows) -> Tensor:
    """[rows, columns] of up to 8 rows, number by number as they lie arranged."""
    if isinstance(rows, WeighedRows):
        return rows.rows if len(rows) == 1 else plain(rows.rows)
    # [block, half, row, pair, quarter, number] -> [row, block, half, quarter, pair, number]
    columns = rows.columns.view(-1, 2, 8, 4, 2, 4).permute(2, 0, 1, 4, 3, 5)
    return columns.reshape(8, rows.num_columns)[: len(rows)]


def products() -> Iterator[tuple[str, tuple[int, int], tuple[QuantSplit, ...], tuple[int, ...]]]:
    for i, name in enumerate(EMULATED):
        yield name, SHAPES[i // 2 % 2], (SPLITS[i % len(SPLITS)],), EMULATED_ROWS[i % 3]


def rows(num_rows: int, num_columns: int, device: torch.device) -> Tensor:
    return torch.randn(num_rows, num_columns, device=device, dtype=torch.bfloat16)


@on_both(
    "name, shape, splits, numbers_of_rows",
    [(name, shape, (None, *SPLITS), ANY_ROWS) for name in ALL for shape in SHAPES],
    [*products()],
)
def test_products_are_those_of_float64(
    name: str,
    shape: tuple[int, int],
    splits: Sequence[QuantSplit | None],
    numbers_of_rows: Sequence[int],
    place,
) -> None:
    tiled, numbers = matrix(ALL[name], *shape, place)
    x = rows(64, shape[1], place)
    for num_rows in numbers_of_rows:
        for chosen in splits:
            part = x[:num_rows]
            found = quant_gemv_cuda.linear(part, tiled, dtype=torch.float32, chosen=chosen)
            assert error(found, part, numbers) < 1e-5, (num_rows, chosen)


@on_both("name", [*ALL], ["Q4_K", "Q8_0"])
def test_a_row_is_the_same_bits_among_up_to_eight(name: str, place) -> None:
    tiled, _ = matrix(ALL[name], 96, 2304, place)
    x, norm = rows(8, 2304, place), Norm(torch.rand(2304, device=place) + 0.5)
    for given in (None, norm):
        together = quant_gemv_cuda.linear(x, tiled, norm=given, dtype=torch.float32)
        three = quant_gemv_cuda.linear(x[:3], tiled, norm=given, dtype=torch.float32)
        assert torch.equal(three, together[:3])
        for row in range(8):
            one = quant_gemv_cuda.linear(x[row : row + 1], tiled, norm=given, dtype=torch.float32)
            assert torch.equal(one[0], together[row])


@on_both(
    "name, num_rows",
    [(name, num_rows) for name in FEW for num_rows in (1, 5, 16)],
    [("Q4_K", 1), ("Q8_0", 5), ("Q4_K", 16)],
)
def test_norm_residual_and_swiglu(name: str, num_rows: int, place) -> None:
    tiled, numbers = matrix(ALL[name], 96, 768, place)
    x, norm = rows(num_rows, 768, place), Norm(torch.rand(768, device=place) + 0.5)
    residual = rows(num_rows, 96, place)
    product = F.linear(x.double(), numbers.double())
    found = quant_gemv_cuda.linear(x, tiled, residual, dtype=torch.float32)
    torch.testing.assert_close(found.double(), residual + product, rtol=1e-4, atol=1e-4)
    gate, up = product.chunk(2, -1)
    found = quant_gemv_cuda.swiglu(x, tiled, dtype=torch.float32)
    torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    normed = F.rms_norm(x.float(), (768,), norm.weight, norm.eps)
    found = quant_gemv_cuda.linear(x, tiled, norm=norm, dtype=torch.float32)
    assert error(found, normed, numbers) < 2e-3  # normed numbers are rounded once, to bfloat16


@on_both(
    "name, paired",
    [(name, paired) for name in FEW for paired in (False, True)],
    [("Q4_K", True), ("Q6_K", False)],
)
def test_programs_that_go_on_give_the_same_bits(
    name: str, paired: bool, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled, _ = matrix(ALL[name], 352, 768, place)
    x, residual = rows(13, 768, place), rows(13, 352, place)
    for chosen in (
        QuantSplit(2, 2, 2, goes_on=True),
        QuantSplit(2, 2, 3, splits=2, goes_on=True),
    ):

        def product(chosen: QuantSplit) -> Tensor:
            if paired:
                return quant_gemv_cuda.swiglu(x, tiled, chosen=chosen)
            return quant_gemv_cuda.linear(x, tiled, residual, chosen=chosen)

        at_once = product(replace(chosen, goes_on=False))
        monkeypatch.setattr(quant_gemv_cuda, "num_multiprocessors", lambda tensor: 1)
        assert torch.equal(product(chosen), at_once)


@on_both(
    "name, num_rows",
    [(name, num_rows) for name in ALL for num_rows in (5, 9, 16, 24, 64)],
    [("Q4_K", 11), ("Q4_K", 20), ("Q5_K", 16), ("Q6_K", 9), ("Q8_0", 13), ("IQ4_NL", 5)],
)
def test_a_product_arranges_its_results_for_the_next_one(name: str, num_rows: int, place) -> None:
    gate_up, _ = matrix(ALL["Q4_K"], 1024, 256, place)
    down, numbers = matrix(ALL[name], 48, 512, place)
    x, norm = rows(num_rows, 256, place), Norm(torch.rand(256, device=place) + 0.5)
    inner = quant_gemv_cuda.swiglu(x, gate_up, norm=norm)
    given = quant_gemv_cuda.swiglu_for(x, gate_up, down.coding, norm=norm)
    if num_rows > prepared_rows.MOST_FEW:
        arranged = prepared_rows.arrange(inner, [down.coding])
        assert torch.equal(given.of(down.coding), arranged.of(down.coding))
    else:
        assert torch.equal(plain(given), inner)
    found = quant_gemv_cuda.linear(given, down, dtype=torch.float32)
    assert error(found, inner, numbers) < 1e-5


@on_both("num_rows", [1, 5, 11], [1, 11])
def test_rows_are_prepared_once_for_several_matrices(num_rows: int, place) -> None:
    x, norm = rows(num_rows, 512, place), Norm(torch.rand(512, device=place) + 0.5)
    several = [matrix(ALL[name], 48, 512, place)[0] for name in ("Q4_K", "Q6_K")]
    given = prepared_rows.prepared(x, [each.coding for each in several], norm)
    for tiled in several:
        found = quant_gemv_cuda.linear(given, tiled)
        assert torch.equal(found, quant_gemv_cuda.linear(x, tiled, norm=norm))


@on_both("num_rows", [1, 5, 11], [5, 11])
def test_a_product_beside_another_gives_what_it_gives_alone(num_rows: int, place) -> None:
    """It starts, and may finish its sums, before the preceding one has, many times in turns."""
    x = rows(num_rows, 1024, place)
    names = ("Q4_K", "Q6_K", "Q5_K")
    several = [
        matrix(ALL[name], size, 1024, place)[0]
        for name, size in zip(names, (96, 48, 160), strict=True)
    ]
    alone = [quant_gemv_cuda.linear(x, tiled) for tiled in several]
    for _ in range(1 if place.type == "cpu" else 50):
        given = prepared_rows.prepared(x, [tiled.coding for tiled in several])
        wide = x.new_full((num_rows, 304), torch.nan)
        parts = wide.split([96, 48, 160], 1)
        for i, (tiled, part) in enumerate(zip(several, parts, strict=True)):
            quant_gemv_cuda.linear(given, tiled, out=part, beside=i > 0)
        for part, wanted in zip(parts, alone, strict=True):
            assert torch.equal(part, wanted)


@on_both("num_rows", [1, 7, 16], [1, 16])
def test_results_may_be_columns_of_a_wider_matrix(num_rows: int, place) -> None:
    tiled, _ = matrix(ALL["Q4_K"], 48, 512, place)
    x = rows(num_rows, 512, place)
    wide = torch.full((num_rows, 80), 7.0, device=place, dtype=torch.bfloat16)
    quant_gemv_cuda.linear(x, tiled, out=wide[:, 16:64])
    assert torch.equal(wide[:, 16:64], quant_gemv_cuda.linear(x, tiled))
    assert (wide[:, :16] == 7).all() and (wide[:, 64:] == 7).all()


@on_both("num_rows", [17, 33, 64], [21])
def test_more_rows_are_multiplied_sixteen_by_sixteen(
    num_rows: int, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights take up to 64 rows with the programs of few rows: nothing is dequantised."""
    monkeypatch.setattr(quant_gemv_cuda, "can_multiply", lambda x: len(x) <= MAX_ROWS)
    gate_up, _ = matrix(ALL["Q4_K"], 1024, 256, place)
    down, _ = matrix(ALL["Q6_K"], 96, 512, place)
    x, residual = rows(num_rows, 256, place), rows(num_rows, 96, place)
    network = TiledQuantSwiGLU(
        TiledQuantWeight(gate_up, 0, torch.bfloat16), TiledQuantWeight(down, 0, torch.bfloat16)
    )
    inner = network.gate_up.swiglu(x)
    assert torch.equal(inner, quant_gemv_cuda.swiglu(x, gate_up))
    found = network.down.linear_add(inner, residual)
    assert torch.equal(found, quant_gemv_cuda.linear(inner, down, residual))


@on_both("num_rows", [1, 8, 16, 40], [1, 5, 19])
def test_logits_are_not_rounded_on_their_way(
    num_rows: int, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant_gemv_cuda, "can_multiply", lambda x: len(x) <= MAX_ROWS)
    tiled, numbers = matrix(ALL["Q6_K"], 96, 768, place)
    table = TiledQuantWeight(tiled, 0, torch.bfloat16)
    x, norm = rows(num_rows, 768, place), ops.Norm(TritonOps(), torch.ones(768, device=place), 1e-6)
    out = torch.full((num_rows, 96), torch.nan, device=place)
    assert table.linear_float(x, out=out) is out
    assert error(out, x, numbers) < 1e-5
    normed = quant_gemv_cuda.linear(x, tiled, norm=norm, dtype=torch.float32)
    assert torch.equal(table.linear_float(x[None], norm)[0], normed)


@on_both(
    "name, size",
    [(name, size) for name in FEW for size in (1e-6, 1e6)],
    [("Q4_K", 1e-6), ("Q4_K", 1e6)],
)
def test_large_and_small_rows_lose_nothing(name: str, size: float, place) -> None:
    """Rows are scaled by a power of two, and results by another."""
    tiled, numbers = matrix(ALL[name], 48, 512, place)
    for num_rows in (1, 8, 16):
        x = rows(num_rows, 512, place) * size
        found = quant_gemv_cuda.linear(x, tiled, dtype=torch.float32)
        assert error(found, x, numbers) < 1e-5, num_rows


def work(name: str, x_rows: int = 1, *, num_outputs: int = 9728) -> QuantWork:
    coding, scales = coding_of(ALL[name]), DTYPES[ALL[name].scale]
    return QuantWork(coding, scales, num_outputs, 2560, x_rows, x_rows != 8)


@pytest.mark.parametrize("shared_kib", sorted({CARDS[name].shared_kib for name in CAPABILITIES}))
@pytest.mark.covered(1)
@pytest.mark.parametrize("num_outputs", [1024, 2560, 9728, 151936])
@pytest.mark.parametrize("name", ALL)
def test_splits_fit_and_divide_few_rows_alike(name: str, num_outputs: int, shared_kib: int) -> None:
    found = {}
    for x_rows in (1, 8, 16, 32):
        wanted = work(name, x_rows, num_outputs=num_outputs)
        found[x_rows] = choose_split(wanted, shared_kib * KIB)
        assert shared_of(wanted, found[x_rows]) <= shared_kib * KIB


@pytest.mark.parametrize("num_columns", [2560, 4096, 9728])
@pytest.mark.parametrize("num_outputs", [1024, 2560, 6144, 9728, 151936])
@pytest.mark.parametrize("name", ALL)
def test_up_to_eight_rows_are_divided_alike(name: str, num_outputs: int, num_columns: int) -> None:
    coding, scales = coding_of(ALL[name]), DTYPES[ALL[name].scale]
    for kib in sorted({CARDS[card].shared_kib for card in CAPABILITIES}):
        for has_clusters, paired, is_undivided in product((False, True), repeat=3):
            sizes = num_outputs, num_columns
            works = [QuantWork(coding, scales, *sizes, n, paired, is_undivided) for n in (1, 8)]
            splits = [
                choose_split(each, (kib - 1) * KIB, has_clusters=has_clusters) for each in works
            ]
            assert len({split.warps * split.splits for split in splits}) == 1, (kib, splits)


@pytest.mark.parametrize("bits", ["Q4_K", "Q6_K"])
def test_only_devices_with_clusters_divide_columns_among_programs(bits: str) -> None:
    down = QuantWork(coding_of(ALL[bits]), torch.float16, 2560, 9728, 16, paired=False)
    assert choose_split(down, 227 * KIB, has_clusters=True).splits == 2
    assert choose_split(down, 227 * KIB).splits == 1


def check(name: str, card: str, x_rows: int, folder: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    wanted = work(name, x_rows)
    chosen = choose_split(wanted, CARDS[card].shared_kib * KIB)
    capability = divmod(CAPABILITIES[card], 10)
    constants = constants_of(wanted, chosen, overlaps=capability >= (9, 0))
    binary = folder / "program.cubin"
    binary.write_bytes(compiled(quant_gemv_cuda.SOURCE, constants, capability))
    told = [str(BINARIES / "cuobjdump"), "--dump-resource-usage", str(binary)]
    usage = subprocess.run(told, capture_output=True, text=True, check=True, timeout=60).stdout
    registers, stack_bytes = re.search(r"quant_gemv:\s*REG:(\d+) STACK:(\d+)", usage).groups()
    assert int(registers) * chosen.warps * 32 <= 65536
    assert int(stack_bytes) <= MOST_STACK_BYTES


needs_tools = pytest.mark.skipif(not (BINARIES / "cuobjdump").exists(), reason="no cuobjdump")


@needs_tools
@pytest.mark.slow
@pytest.mark.covered(2)
@pytest.mark.parametrize("x_rows", [1, 16])
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("card", CAPABILITIES)
def test_the_program_fits_every_card(card: str, name: str, x_rows: int, tmp_path: Path) -> None:
    check(name, card, x_rows, tmp_path)


@needs_tools
@pytest.mark.slow
@pytest.mark.covered(1)
@pytest.mark.parametrize("x_rows", [1, 8, 16])
@pytest.mark.parametrize("name", OTHERS)
def test_every_form_is_compiled(name: str, x_rows: int, tmp_path: Path) -> None:
    check(name, "sm_86", x_rows, tmp_path)


def test_a_program_is_compiled_ahead_once() -> None:
    """One compilation for any number of layers: threads that wait for it compile nothing else."""
    asked: list[str] = []
    compiling = SimpleNamespace(submit=lambda name, load: asked.append(name))
    program = CudaProgram(quant_gemv_cuda.SOURCE, "quant_gemv")
    token = kernel._ahead.set(SimpleNamespace(compiling=compiling))
    try:
        for warps in (4, 5, 4, 4):
            program.launch(torch.device("cuda:0"), {"WARPS": warps}, LaunchShape(1, 32 * warps), ())
    finally:
        kernel._ahead.reset(token)
    assert asked == ["quant_gemv"] * 2


def test_the_log_of_the_compiler_is_reported(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    source = tmp_path / "wrong.cu"
    source.write_text("__device__ int f() { return nothing; }", encoding="utf-8")
    with pytest.raises(CompileError, match=r"for sm_90: .*\"nothing\" is undefined"):
        compiled(source, {}, (9, 0))


@on_both("name, num_columns", [(name, n) for name in FEW for n in (384, 2304)], [("Q4_K", 2304)])
def test_rows_in_flight_change_no_bits(name: str, num_columns: int, place) -> None:
    tiled, _ = matrix(ALL[name], 48, num_columns, place)
    x, one = rows(5, num_columns, place), QuantSplit(2, 2, 2)
    wanted = quant_gemv_cuda.linear(x, tiled, chosen=one)
    for ahead in (2, 3):
        split = replace(one, ahead=ahead)
        assert torch.equal(quant_gemv_cuda.linear(x, tiled, chosen=split), wanted)


@on_both("name", [*ALL], ["Q4_K", "Q8_0"])
def test_a_norm_is_divided_among_the_products_around_it(name: str, place) -> None:
    tiled, _ = matrix(ALL[name], 768, 256, place)
    after, numbers = matrix(ALL[name], 64, 768, place)
    norm = Norm(torch.rand(768, device=place) + 0.5)
    x, residual = rows(8, 256, place), rows(8, 768, place) * 4
    found = {}
    for num_rows in (8, 5, 1):
        given = x[:num_rows], tiled, residual[:num_rows]
        out, weighed = quant_gemv_cuda.linear_weighed(*given, norm)
        assert torch.equal(out, quant_gemv_cuda.linear(*given))
        assert torch.equal(plain(weighed), (out.float() * norm.weight).bfloat16())
        alone = prepared_rows.weigh(out, norm)
        assert torch.equal(plain(alone), plain(weighed))
        assert torch.equal(alone.squares, weighed.squares)
        found[num_rows] = quant_gemv_cuda.linear(weighed, after, dtype=torch.float32)
        assert torch.equal(found[num_rows], found[8][:num_rows])
        product = (out.double() * norm.weight) @ numbers.double().T
        rms = (out.double().square().mean(1, keepdim=True) + norm.eps).sqrt()
        torch.testing.assert_close(found[num_rows].double(), product / rms, rtol=4e-3, atol=4e-2)
        gate, up = found[num_rows].chunk(2, 1)
        both = quant_gemv_cuda.swiglu(weighed, after, dtype=torch.float32)
        torch.testing.assert_close(both, F.silu(gate) * up, rtol=1e-4, atol=1e-4)


@on_both("num_rows", [1, 8, 11], [1, 11])
def test_sums_are_prepared_for_the_norm_that_follows(
    num_rows: int, place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quant_gemv_cuda, "can_multiply", lambda x: len(x) <= MAX_ROWS)
    before, after = (
        TiledQuantWeight(matrix(ALL["Q4_K"], *shape, place)[0], 0, torch.bfloat16)
        for shape in ((512, 256), (96, 512))
    )
    norm = ops.Norm(TritonOps(), torch.rand(512, device=place) + 0.5, 1e-6)
    x, residual = rows(num_rows, 256, place), rows(num_rows, 512, place)
    alone = after.linear(before.linear_add(x, residual), norm)
    norm.follow(before)
    out = before.linear_add(x[None], residual[None])
    assert (norm.ahead.take(out[0]) is not None) == (num_rows <= 8)
    out = before.linear_add(x[None], residual[None])
    assert torch.equal(after.linear(out, norm)[0], alone)
    # They are taken once, and only with the same rows.
    other = rows(num_rows, 512, place)
    wanted = after.linear(other, norm)
    before.linear_add(x, residual)
    assert torch.equal(after.linear(other, norm), wanted)
    assert torch.equal(after.linear(out, norm)[0], alone)
