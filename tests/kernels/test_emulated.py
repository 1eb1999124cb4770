"""CUDA C++ on CPUs: races are reported, and numbers are those of a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from luceasync.kernels import cuda_program
from luceasync.kernels.cuda_program import LaunchShape
from tests.kernels.emulated.program import Compiler, EmulatedProgram, Fault

CPU = torch.device("cpu")
KERNELS = Path(cuda_program.__file__).parent
SHARED_BYTES = 1024

# Each lane copies 16 bytes of x, reads the neighbour's copy, and reuses its own place.
TURNS = """
  for (int turn = 0; turn < 3; turn++) {
    copy_16(begin + lane * 16, x + lane * 4, true);
    commit_copies();
    wait_for_copies<0>();
    AFTER_COPY;
    out[blockIdx.x * 64 + lane] += load<uint4>(begin + (lane ^ 1) * 16).x;
    BEFORE_REUSE;
  }
"""
SYNC = "__syncwarp()"
# Lanes that do not wait for each other may run in either order.
NO_SYNC = r"lane \d+ (reads|copies to) byte \d+ .*(copy of program|without a sync since)"
MISTAKES = {
    "others' copies are read before they have waited": (
        NO_SYNC,
        TURNS.replace("AFTER_COPY", "").replace("BEFORE_REUSE", SYNC),
    ),
    "what others read is copied to": (
        NO_SYNC,
        TURNS.replace("BEFORE_REUSE", "").replace("AFTER_COPY", SYNC),
    ),
    "what others may read is written": (
        "writes byte .* has read without a sync since|reads byte .* has written without a sync",
        "*(u32*)(shared + lane * 4) = load<u32>(begin + (lane ^ 1) * 4);",
    ),
    "not aligned": (
        "reads 8 bytes at 4 of shared memory, which is no multiple",
        "load<uint2>(begin + 4);",
    ),
    "past the end": ("reads 4 bytes at 1024 of 1024 bytes", "load<u32>(begin + 1024);"),
    "not from where shared memory begins": (
        "reads 4 bytes at -1024 of 1024 bytes",
        "load<u32>(0);",
    ),
    "written past the end": (
        "writes 16 bytes at 1024 of 1024 bytes",
        "*(uint4*)(shared + 1024) = {};",
    ),
    "written past the end from before it": (
        "has written to byte 1028 of 1024 bytes",
        "if (lane == 15) ((u32*)(shared + 960))[17] = 7;",
    ),
    "copied from elsewhere": (
        "copies 16 bytes from outside of all tensors",
        "copy_16(begin + lane * 16, x + 4096, true);",
    ),
    "copied from where it is not aligned": (
        "copies 16 bytes from where no such number is aligned",
        "copy_16(begin + lane * 16, x + 1, true);",
    ),
    "a copy that nobody waits for": (
        "ends while its copies are on their way",
        "copy_16(begin + lane * 16, x, true);",
    ),
    "a warp without a lane": (
        "waits at a sync of the warp for ever: of 128 lanes 66 have ended",
        "if (lane < 32 && lane != 7) __syncwarp();",
    ),
    "a program without a warp": (
        "waits at a sync of the program for ever: of 128 lanes 64 have ended",
        "if (lane < 32) __syncthreads();",
    ),
    "lanes of a warp at several places": (
        "waits at .*, where program ., warp ., lane .* waits at ",
        "if (lane % 32 == 5) __syncwarp(); else __shfl_xor_sync(~0u, lane, 1);",
    ),
    "a tensor written past its end": (
        "has written outside of a tensor",
        "out[256] = 1;",
    ),
    "memory of a program that has ended": (
        "reads memory of program 1, .* which has ended",
        """
        if (blockIdx.x == 1) return;
        for (int i = 0; i < 1000; i++) __syncthreads();
        load_of_program(begin, 1);""",
    ),
}


RIGHT = (
    TURNS.replace("AFTER_COPY", SYNC).replace("BEFORE_REUSE", SYNC)
    + """
  __syncthreads();
  own[lane] = 100 * (blockIdx.x + 1) + lane;
  *(float*)(shared + lane * 4) = lane + 1000.0f * blockIdx.x;
  wait_for_cluster();
  __syncthreads();
  float other = load_of_program(begin + (63 - lane) * 4, 1 - blockIdx.x);
  out[128 + blockIdx.x * 64 + lane] = other + own[lane];
  wait_for_cluster();"""
)
HALVES = """
  const u16* halves = (const u16*)x;
  for (u32 i = lane; i < 65536; i += 64) out[i] = __float_as_uint(half_of(halves[i]));"""
ROUNDED = """
  for (u32 i = lane; i < 4096; i += 64) {
    out[i] = rounded(as_float(x[i]), as_float(x[4096 + i]));
    out[65536 + i] = fma_bf16x2(x[i], x[4096 + i], x[8192 + i]);
  }"""
PRODUCTS = """
  if (lane >= 32) return;
  const u32 *b = x + 128;
  int g = lane / 4, c = lane % 4;
  u32 four[4];
  for (int k = 0; k < 4; k++) four[k] = x[(g + k % 2 * 8) * 8 + c + k / 2 * 4];
  float sums[4] = {}, half[4] = {};
  multiply(sums, four, b[g * 8 + c], b[g * 8 + c + 4]);
  multiply(half, four[0], four[1], b[g * 8 + c]);
  for (int k = 0; k < 4; k++) {
    int at = (g + k / 2 * 8) * 8 + 2 * c + k % 2;
    out[at] = __float_as_uint(sums[k]), out[128 + at] = __float_as_uint(half[k]);
  }"""
MATRICES = """
  if (lane >= 32) return;
  *(uint4*)(shared + lane * 16) = ((const uint4*)x)[lane];
  __syncwarp();
  u32 plain[4], transposed[4];
  load_matrices<false>(plain, begin + lane * 16);
  load_matrices<true>(transposed, begin + lane * 16);
  for (int i = 0; i < 4; i++)
    out[i * 32 + lane] = plain[i], out[128 + i * 32 + lane] = transposed[i];"""
BODIES = [*(body for _, body in MISTAKES.values()), RIGHT, HALVES, ROUNDED, PRODUCTS, MATRICES]

Run = Callable[..., None]


@pytest.fixture(scope="module")
def run(compiler: Compiler, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`run(body, x, out)`: a kernel with this body, of two programs of two warps. All bodies are
    one source: a compilation takes longer than a run.
    """
    cases = "\n".join(f"case {i}: {{ {body} break; }}" for i, body in enumerate(BODIES))
    source = tmp_path_factory.mktemp("bodies") / "kernel.cu"
    source.write_text(
        f"""
#include "device_words.cuh"
template <typename T>
__device__ T* of_program() {{
  __shared__ T own[64];
  return own;
}}
extern "C" __global__ void kernel(const u32* x, u32* out, int body) {{
  u32 begin = shared_begin(), lane = threadIdx.x;
  u32* own = of_program<u32>();
  switch (body) {{
    {cases}
  }}
}}
""",
        encoding="utf-8",
    )
    program = EmulatedProgram(source, "kernel", compiler)
    shape = LaunchShape(2, 64, SHARED_BYTES, cluster=2)
    return lambda body, *tensors: program.launch(CPU, {}, shape, (*tensors, BODIES.index(body)))


@pytest.mark.parametrize(("words", "body"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported(words: str, body: str, run: Run) -> None:
    x, out = torch.zeros(1024, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    with pytest.raises(Fault, match=words):
        run(body, x, out)


def test_what_is_right_runs(run: Run) -> None:
    """Syncs in turns; programs of a cluster that read each other's memory, and have their own."""
    x, out = torch.arange(1024, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    run(RIGHT, x, out)
    lanes = torch.arange(64)
    for program in range(2):
        copied, read = out.view(2, 2, 64)[:, program]
        assert torch.equal(copied.long(), 3 * 4 * (lanes ^ 1)), "in three turns"
        assert (read == 163 + 100 * program + 1000 * (1 - program)).all()


def test_numbers_are_rounded_as_a_gpu_rounds_them(run: Run) -> None:
    halves = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    torch.manual_seed(0)
    floats = torch.randint(-(1 << 31), 1 << 31, (3, 1 << 12)).to(torch.int32)
    floats[:, ::2] &= -(1 << 15)  # half way between two
    found = torch.zeros(2, 1 << 16, dtype=torch.int32)
    run(HALVES, halves, found)
    expected = halves.view(torch.float16).float()
    assert torch.equal(found[0].view(torch.float32).nan_to_num(9), expected.nan_to_num(9))
    run(ROUNDED, floats, found)
    pairs = found[0, :4096].view(torch.bfloat16).view(-1, 2)
    expected = floats[:2].view(torch.float32).bfloat16().t()
    assert torch.equal(pairs.nan_to_num(9), expected.nan_to_num(9))
    a, b, c = (each.view(torch.bfloat16).double() for each in floats)
    pairs, exact = found[1, :4096].view(torch.bfloat16).double(), a * b + c
    beside = torch.nextafter(exact.bfloat16(), torch.tensor(0.0, dtype=torch.bfloat16)).double()
    near = (pairs - exact).abs() <= (beside - exact).abs()
    assert (near | ~exact.isfinite() | (exact.abs() > 3e38)).all()


def test_products_are_those_of_matrices(run: Run) -> None:
    """Fragments are laid out as by NVIDIA's mma.m16n8k16 and m16n8k8; subnormal numbers count."""
    torch.manual_seed(0)
    a, b = torch.randint(-9, 9, (16, 16)), torch.randint(-9, 9, (16, 8))
    x = torch.cat([a.double().flatten() * 2.0**-133, b.t().flatten() * 2.0**96]).bfloat16()
    found = torch.zeros(2, 16, 8)
    run(PRODUCTS, x, found)
    assert torch.equal(found[0] * 2.0**37, (a @ b).float())
    assert torch.equal(found[1] * 2.0**37, (a[:, :8] @ b[:8]).float())


def test_matrices_are_loaded_as_ldmatrix_loads_them(run: Run) -> None:
    """A lane gets two columns of row lane / 4, of the matrix or its transpose."""
    x = torch.arange(256, dtype=torch.int16)
    found = torch.zeros(256, dtype=torch.int32)
    run(MATRICES, x, found)
    plain, transposed = found.view(torch.int16).view(2, 4, 8, 8)
    assert torch.equal(plain, x.view(4, 8, 8))
    assert torch.equal(transposed, x.view(4, 8, 8).transpose(1, 2))


def test_ptx_has_another_body_here() -> None:
    """PTX is in files of its own, and each has a counterpart in the emulator."""
    emulated = {path.name for path in (KERNELS.parents[1] / "tests/kernels/emulated").glob("*.cuh")}
    holding = {
        path.name for path in KERNELS.glob("*.cu*") if re.search(r"\basm\b", path.read_text())
    }
    assert holding <= emulated
