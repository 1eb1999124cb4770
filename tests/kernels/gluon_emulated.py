"""Runs Gluon kernels for Hopper on CPUs. Partitions are threads; products run when they are waited
for, as late as a GPU may run them; a wait that cannot end is an error, as are copies of a wrong
size. Layouts mean nothing.
"""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

PATIENCE_S = 30.0  # of a partition, for others that compute


class Deadlock(AssertionError):
    """Every partition waits."""


class Partitions:
    """The partitions of one program, and what all of them wait for."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._waiting: set[int] = set()
        self._num_running = 1
        self._error: BaseException | None = None

    def run(self, functions: Sequence[Callable[[], None]]) -> None:
        self._num_running = len(functions)
        threads = [threading.Thread(target=self._run, args=(each,)) for each in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        me = threading.get_ident()
        with self.changed:
            while not is_true():
                self._waiting.add(me)
                self._fail_if_all_wait()
                if self._error is not None:
                    raise self._error
                assert self.changed.wait(PATIENCE_S), "nothing happens"
            self._waiting.discard(me)

    def notify(self) -> None:
        """With `changed` held: let those that wait look again."""
        self._waiting.clear()
        self.changed.notify_all()

    def _run(self, function: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            function()
        except BaseException as caught:  # raised by `run`
            error = caught
        with self.changed:
            self._error = self._error or error
            self._num_running -= 1
            self._fail_if_all_wait()
            self.changed.notify_all()

    def _fail_if_all_wait(self) -> None:
        if self._waiting and len(self._waiting) == self._num_running:
            self._error = self._error or Deadlock("every partition waits")
            self.changed.notify_all()


class MBarrier:
    """A barrier: a phase ends when all have arrived and all expected bytes have been copied."""

    def __init__(self) -> None:
        self.count = self.num_missing = self.num_bytes = self.phase = 0

    def end_if_complete(self, partitions: Partitions) -> None:
        assert self.num_missing >= 0 and self.num_bytes >= 0, "more came than was expected"
        if self.num_missing == self.num_bytes == 0:
            self.phase += 1
            self.num_missing = self.count
            partitions.notify()


class Shared:
    """Shared memory, NaN at first."""

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.dtype, self.shape = data.dtype, data.shape

    def index(self, i: int) -> Shared:
        return Shared(self.data[i])

    def slice(self, begin: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, begin, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, x: Tensor) -> None:
        self.data.copy_(x)


class Pointer:
    """A pointer to a tensor's numbers, or a tensor of such pointers."""

    def __init__(self, numbers: Tensor, at: Any = 0) -> None:
        self.numbers, self.at = numbers, at
        self.dtype = SimpleNamespace(element_ty=numbers.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.numbers, self.at + offset)

    def load(self) -> Any:
        found = self.numbers.view(-1)[self.at]
        return found if isinstance(self.at, Tensor) else found.item()

    def store(self, x: Tensor, mask: Tensor) -> None:
        at, ok = (each.expand_as(x) for each in (self.at, mask))
        self.numbers.view(-1)[at[ok]] = x[ok]


class MBarriers:
    def __init__(self, count: int) -> None:
        self._each = [MBarrier() for _ in range(count)]

    def index(self, i: int) -> MBarrier:
        return self._each[i]


class Product:
    """An asynchronous product."""

    def __init__(self, a: Any, b: Shared, total: Any, use_acc: bool) -> None:
        self._operands = a, b, total, use_acc
        self.value: Tensor | None = None

    def run(self) -> None:
        a, b, total, use_acc = self._operands
        a, total = (getattr(x, name, x) for x, name in ((a, "data"), (total, "value")))
        # Row by row: a library's bits of a row may depend on where it stands.
        found = (a.float()[:, :, None] * b.data.float()[None]).sum(1)
        self.value = found + total if use_acc else found


class Machine:
    """What one program of a grid runs on: the words of Gluon that kernels use."""

    def __init__(self, program: tuple[int, ...], grid: tuple[int, ...]) -> None:
        self._program, self._grid = program, grid
        self._partitions = Partitions()
        self._of_thread = threading.local()

    def words(self) -> dict[str, Any]:
        return {
            "gl": self._language(),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._copy,
                async_copy_shared_to_global=_store,
                store_wait=lambda pendings: None,
            ),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: MBarrier,
                init=_init,
                wait=self._wait,
                arrive=self._arrive,
                expect=self._expect,
            ),
            "async_copy": SimpleNamespace(
                async_copy_global_to_shared=self._begin_copy,
                commit_group=lambda: None,  # after each copy
                wait_group=self._wait_for_copies,
            ),
            "fence_async_shared": lambda: None,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
        }

    def _language(self) -> SimpleNamespace:
        def layout(*sizes: object) -> None:
            return None

        return SimpleNamespace(
            float32=torch.float32,
            int32=torch.int32,
            int64=torch.int64,
            program_id=self._program.__getitem__,
            num_programs=self._grid.__getitem__,
            load=Pointer.load,
            store=Pointer.store,
            static_range=range,
            arange=lambda begin, end, layout: torch.arange(begin, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            max=torch.amax,
            sum=torch.sum,
            exp=torch.exp,
            exp2=torch.exp2,
            where=torch.where,
            maximum=partial(_of_two, max, torch.maximum),
            minimum=partial(_of_two, min, torch.minimum),
            convert_layout=lambda x, layout: x,
            cast=lambda x, dtype, bitcast: x.int().view(dtype),  # of 4 bytes
            fma=lambda x, y, z: (x.double() * y.double() + z.double()).float(),
            broadcast=torch.broadcast_tensors,
            join=lambda x, y: torch.stack([x, y], -1),
            BlockedLayout=layout,
            NVMMADistributedLayout=layout,
            SliceLayout=layout,
            DotOperandLayout=layout,
            allocate_shared_memory=_allocate,
            warp_specialize=self._specialize,
        )

    def _specialize(self, parts: Sequence[Any], num_warps: object, registers: object) -> None:
        self._partitions.run([partial(function, *given) for function, given in parts])

    def _wait(self, barrier: MBarrier, parity: int) -> None:
        self._partitions.wait_until(lambda: (barrier.phase - 1) % 2 == parity)

    def _arrive(self, barrier: MBarrier, count: int, pred: bool = True) -> None:
        if not pred:
            return
        with self._partitions.changed:
            barrier.num_missing -= count
            barrier.end_if_complete(self._partitions)

    def _expect(self, barrier: MBarrier, num_bytes: int) -> None:
        with self._partitions.changed:
            barrier.num_bytes += num_bytes
            barrier.num_missing -= 1

    def _copy(self, source: Rows, at: Sequence[int], barrier: MBarrier, to: Shared) -> None:
        assert list(to.shape) == source.block
        to.data.copy_(source.read(*at))
        with self._partitions.changed:
            barrier.num_bytes -= to.data.nbytes
            barrier.end_if_complete(self._partitions)

    def _begin_copy(self, to: Shared, source: Pointer) -> None:
        self._copies().append((to, source))

    def _wait_for_copies(self, num_outstanding: int) -> None:
        copies = self._copies()
        while len(copies) > num_outstanding:
            to, source = copies.pop(0)
            to.data.copy_(source.load())

    def _copies(self) -> list[tuple[Shared, Pointer]]:
        copies: list[tuple[Shared, Pointer]]
        copies = self._of_thread.__dict__.setdefault("copies", [])
        return copies

    def _multiply(
        self, a: Any, b: Shared, total: Any, use_acc: bool = True, is_async: bool = False
    ) -> Product:
        assert is_async
        product = Product(a, b, total, use_acc)
        self._products().append(product)
        return product

    def _wait_for_products(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        products = self._products()
        while len(products) > num_outstanding:
            products.pop(0).run()
        found = tuple(
            each if _is_among(each, products) else getattr(each, "value", each) for each in deps
        )
        return found if len(found) > 1 else found[0]

    def _products(self) -> list[Product]:
        products: list[Product] = self._of_thread.__dict__.setdefault("products", [])
        return products


class Rows:
    """In place of a TensorDescriptor."""

    def __init__(
        self, x: Tensor, shape: list[int], strides: list[int], block: list[int], layout: object
    ) -> None:
        self._all = x.as_strided(shape, strides)
        self.block, self.layout, self.dtype = block, layout, x.dtype

    def read(self, row: int, column: int) -> Tensor:
        """A block; zeros where there are no rows."""
        found = torch.zeros(self.block, dtype=self.dtype)
        first, part = self._part(row, column)
        found[first : first + len(part)] = part
        return found

    def write(self, row: int, column: int, x: Tensor) -> None:
        """A block, as far as there are rows."""
        first, part = self._part(row, column)
        part.copy_(x[first : first + len(part)])

    def _part(self, row: int, column: int) -> tuple[int, Tensor]:
        num_rows, width = self.block
        part = self._all[max(row, 0) : max(row + num_rows, 0), column : column + width]
        assert part.shape[1] == width
        return max(-row, 0), part


def _is_among(each: Any, products: Sequence[Product]) -> bool:
    return any(each is product for product in products)


def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: object) -> Any:
    if layout is MBarrier:
        return MBarriers(shape[0]) if len(shape) > 1 else MBarrier()
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def _init(barrier: MBarrier, count: int) -> None:
    barrier.count = barrier.num_missing = count


def _store(to: Rows, at: Sequence[int], source: Shared) -> None:
    to.write(*at, source.data)


def _of_two(
    numbers: Callable[..., Any], tensors: Callable[..., Tensor], a: Any, b: Any
) -> int | float | Tensor:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        found: int | float = numbers(a, b)
        return found
    return tensors(*(torch.as_tensor(x) for x in (a, b)))


class EmulatedKernel:
    """In place of a Kernel: runs every program of a grid."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name = module, name
        self._function = getattr(module, name)._jit.fn

    def launch(
        self,
        grid: tuple[int, int, int],
        *arguments: Any,
        num_warps: int,
        maxnreg: int,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        given = [Pointer(each) if isinstance(each, Tensor) else each for each in arguments]
        for program in itertools.product(*map(range, grid)):
            self._with(Machine(program, grid))(*given, **constants)

    def _with(self, machine: Machine) -> Callable[..., None]:
        """The kernel with this machine's words."""
        words = vars(self._module) | machine.words()
        functions = {name: x.fn for name, x in words.items() if hasattr(x, "cache_key")}
        for name, function in (functions | {self._name: self._function}).items():
            words[name] = types.FunctionType(function.__code__, words)
        for name, number in words.items():
            if type(number).__name__ == "constexpr":
                words[name] = number.value
        kernel: Callable[..., None] = words[self._name]
        return kernel


def emulate(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
    """Run a module's kernel `name` on the CPU."""
    monkeypatch.setattr(module, name, EmulatedKernel(module, name))
    monkeypatch.setattr(module, "_Blocks", Rows, raising=False)
