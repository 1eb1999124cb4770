"""What a device offers, as plain data: a plan reads nothing else, and another process can send it.

The table of backends says what is the same for every device of a kind. Pure: no torch. How a thing
is done on a device is not known here; see luceasync.pipeline.platform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from luceasync.models.precision import Dtype

# A short chunk of a prompt is filled up to one of these: then its pass is a captured graph too, one
# launch where a GPU would wait for hundreds.
SHORT_ROWS = (16, 64)
NUM_STAGED_STATES = 2  # recurrent states on their way to host memory, on each GPU
NUM_STAGED_TOKENS = 2 * 16384  # see luceasync.host_cache.staging
CPU_PREFILL_TOKENS, GPU_PREFILL_TOKENS = 256, 2048  # of a prompt in one pass, unless it is named
ONE_THREAD_BYTES = 128 * 2**20
HERE = 0  # the process that plans


@dataclass(frozen=True, slots=True)
class DecodeRule:
    """Which sizes the batches of decode steps have. `doubles`: powers of two and the largest, since
    each size is a captured graph; else every size. `min_rows`: by dtype the fewest rows in a batch,
    1 where none are named.
    """

    doubles: bool
    min_rows: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Offer:
    """A device as it was found: its name, "cuda:0", and what can be planned with.

    `native_dtypes`: what it computes in without emulation. `chosen_share`: of the free memory, what
    we fill where the user names no sizes. `short_rows`: see SHORT_ROWS. `num_staged_states`: places
    for recurrent states that wait for a copy to host memory. `num_staged_tokens`: of one layer,
    which pass by where a chunk of a prompt sees more than is on the device. `computes_beside`: work
    is queued, and the host is free meanwhile. `one_thread_bytes`: of the weights of all that
    computes on the host; with fewer than that, threads wait for each other longer than they
    compute. `process`: whose it is. Only that process may open its name: to torch the "hip:0" of
    one is the "cuda:0" of another.
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
    computes_beside: bool = False
    one_thread_bytes: int = 0
    process: int = HERE

    @property
    def is_here(self) -> bool:
        """Whether this process may open it."""
        return self.process == HERE

    def is_same(self, other: Offer) -> bool:
        """Whether both are one device: another process may have one of the same name."""
        return (self.process, self.name) == (other.process, other.name)


# RAM is shared with other programs, so there our choice is modest. A row's result must not depend
# on how many rows run beside it: on CPUs bf16 products keep that by themselves, float32 ones from
# four rows on.
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
    computes_beside=True,
)
_BY_BACKEND = {"cpu": _CPU, "cuda": _GPU, "hip": _GPU}
BACKENDS = tuple(_BY_BACKEND)


def offer_of(name: str, free_bytes: int, native_dtypes: Sequence[str] = ("bf16", "fp32")) -> Offer:
    """What the device `name`, "cuda:0", offers with so much free memory."""
    of_kind = _BY_BACKEND[name.partition(":")[0]]
    return replace(of_kind, name=name, free_bytes=free_bytes, native_dtypes=tuple(native_dtypes))


def default_dtype(offers: Sequence[Offer]) -> Dtype:
    """bf16 where every device computes in it natively, else fp32."""
    return "bf16" if all("bf16" in offer.native_dtypes for offer in offers) else "fp32"


def decode_sizes(offers: Sequence[Offer], dtype: str, parallel: int) -> tuple[int, ...]:
    """The batch sizes that a decode step over all these devices is run with; a step is filled up to
    the next one.
    """
    if any(offer.decode.doubles for offer in offers):
        powers = [2**i for i in range(parallel.bit_length()) if 2**i < parallel]
        return (*powers, parallel)
    first = max(offer.decode.min_rows.get(dtype, 1) for offer in offers)
    return tuple(range(min(parallel, first), parallel + 1))
