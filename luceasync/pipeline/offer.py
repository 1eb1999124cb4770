"""What a device offers, as plain data that a plan reads and that a process can send.

The table of backends holds what all devices of a kind have in common. Pure: no torch. For how a
device works, see luceasync.pipeline.platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from luceasync.models.precision import Dtype

# Short prefill chunks are padded to one of these sizes, so that they are captured graphs too: one
# launch instead of hundreds, for which a GPU would wait.
SHORT_ROWS = (16, 64)
NUM_STAGED_STATES = 2  # recurrent states on their way to host memory, on each GPU
NUM_STAGED_TOKENS = 2 * 16384  # see luceasync.host_cache.staging
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 256, 2048  # default prefill chunks
ONE_THREAD_BYTES = 128 * 2**20
HERE = 0  # the process that makes the plan


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """The batch sizes of decode steps. `doubles`: powers of two and the largest size, because each
    size is a captured graph; otherwise every size. `min_rows`: fewest rows in a batch by dtype, 1
    by default."""

    doubles: bool
    min_rows: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Offer:
    """A device as found, named like "cuda:0", and what can be planned with.

    - `native_dtypes`: dtypes that it computes in without emulation.
    - `chosen_share`: share of free memory to fill when the user names no sizes.
    - `short_rows`: see SHORT_ROWS.
    - `num_staged_states`: recurrent states that may wait for a copy to host memory.
    - `num_staged_tokens`: tokens of one layer in staging, for prefill chunks with absent rows.
    - `runs_async`: work is queued, which leaves the host free.
    - `one_thread_bytes`: with fewer bytes of weights on the host in all, threads wait for each
      other longer than they compute.
    - `process`: its owner, the only one that may open the name: to torch the "hip:0" of one process
      is the "cuda:0" of another.
    """

    name: str
    free_bytes: int
    native_dtypes: tuple[str, ...]
    chosen_share: float
    prefill_chunk_tokens: int
    decode: DecodeRule
    short_rows: tuple[int, ...] = ()
    num_staged_states: int = 0
    num_staged_tokens: int = 0
    runs_async: bool = False
    one_thread_bytes: int = 0
    process: int = HERE

    @property
    def is_here(self) -> bool:
        """Whether this process may open the device."""
        return self.process == HERE

    def is_same(self, other: Offer) -> bool:
        """Whether both are the same device; different processes may have devices of the same
        name."""
        return (self.process, self.name) == (other.process, other.name)


# Other programs share RAM, so the CPU's share is modest. A row's result must not depend on the
# number of rows beside it: bf16 products on CPUs guarantee that, float32 ones from four rows on.
_CPU = Offer(
    name="cpu",
    free_bytes=0,
    native_dtypes=("bf16", "fp32"),
    chosen_share=0.5,
    prefill_chunk_tokens=CPU_PREFILL_TOKENS,
    decode=DecodeRule(doubles=False, min_rows={"fp32": 4}),
    one_thread_bytes=ONE_THREAD_BYTES,
)
_GPU = Offer(
    name="gpu",
    free_bytes=0,
    native_dtypes=("bf16", "fp32"),
    chosen_share=0.92,
    prefill_chunk_tokens=GPU_PREFILL_TOKENS,
    decode=DecodeRule(doubles=True),
    short_rows=SHORT_ROWS,
    num_staged_states=NUM_STAGED_STATES,
    num_staged_tokens=NUM_STAGED_TOKENS,
    runs_async=True,
)
_BY_BACKEND = {"cpu": _CPU, "cuda": _GPU, "hip": _GPU}
BACKENDS = tuple(_BY_BACKEND)


def backend_of(name: str) -> str:
    """The backend of device "cuda:0" or "box2/cuda:0": "cuda"."""
    return own_name(name).partition(":")[0]


def machine_of(name: str) -> str:
    """The machine of device "box2/cuda:0": "box2"; empty: this one."""
    return name.rpartition("/")[0]


def own_name(name: str) -> str:
    """The name of device "box2/cuda:0" on its own machine: "cuda:0"."""
    return name.rpartition("/")[2]


def offer_of(name: str, free_bytes: int, native_dtypes: Sequence[str] = ("bf16", "fp32")) -> Offer:
    """The offer of device `name`, like "cuda:0", with `free_bytes` of free memory."""
    of_kind = _BY_BACKEND[backend_of(name)]
    return replace(of_kind, name=name, free_bytes=free_bytes, native_dtypes=tuple(native_dtypes))


def default_dtype(offers: Sequence[Offer]) -> Dtype:
    """bf16 if every device computes in it natively, otherwise fp32."""
    return "bf16" if all("bf16" in offer.native_dtypes for offer in offers) else "fp32"


def decode_sizes(offers: Sequence[Offer], dtype: str, parallel: int) -> tuple[int, ...]:
    """Batch sizes of decode steps over all these devices; a batch is padded to the next size."""
    if any(offer.decode.doubles for offer in offers):
        powers = [2**i for i in range(parallel.bit_length()) if 2**i < parallel]
        return (*powers, parallel)
    first = max(offer.decode.min_rows.get(dtype, 1) for offer in offers)
    return tuple(range(min(parallel, first), parallel + 1))
