"""Runs CUDA C++ programs on CPUs: compiled by the system's C++ compiler with another body of
device_words.cuh, in which lanes are fibers.

Knows no kernel. machine.h lists the mistakes that it detects.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from luceasync.kernels.cuda_program import LaunchShape

HERE = Path(__file__).parent
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-w"),
    "-O0",  # compiling a program takes longer than running it
    "-ffp-contract=off",  # products and sums are rounded separately
    "-fno-strict-aliasing",  # words are read as other types than they were written
    "-U_FORTIFY_SOURCE",  # it mistakes the stack of another fiber for a lost one
)
LANES = 32
BESIDE_BYTES = 4096  # of a tensor


class Fault(Exception):
    """A mistake that a GPU would make silently, or at random."""


class _Range(ctypes.Structure):
    _fields_ = (("begin", ctypes.c_uint64), ("end", ctypes.c_uint64))


class _Launch(ctypes.Structure):
    """As in machine.h."""

    _fields_ = (
        ("num_programs", ctypes.c_uint32),
        ("num_threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("cluster", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("num_ranges", ctypes.c_uint32),
        ("ranges", ctypes.POINTER(_Range)),
        ("begin_statics", ctypes.c_void_p),
        ("end_statics", ctypes.c_void_p),
    )


class Compiler:
    """Caches compiled programs in `folder`."""

    def __init__(self, command: str, folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._loaded: dict[str, Any] = {}

    def function(self, source: Path, name: str, constants: Mapping[str, int]) -> Any:
        """A launcher of the function `name`; see launch.h."""
        headers = {path.name: path.read_text() for path in sorted(source.parent.glob("*.cuh"))}
        headers |= {path.name: path.read_text() for path in HERE.glob("*.cuh")}  # other bodies
        text = f"""\
#include "cuda_words.h"
{source.read_text()}
#define FUNCTION {name}
#include "launch.h"
"""
        flags = [f"-D{key}={value}" for key, value in sorted(constants.items())]
        digest = hashlib.sha256(repr((text, headers, flags)).encode()).hexdigest()[:16]
        if digest not in self._loaded:
            place = self._folder / digest
            place.mkdir(exist_ok=True)
            for header, words in headers.items():
                (place / header).write_text(words)
            (place / "program.cpp").write_text(text)
            flags += [f"-I{self._header_folder()}", f"-I{HERE}"]
            self._load_machine()
            self._run(*flags, "-shared", "program.cpp", "-o", "program.so", at=place)
            self._loaded[digest] = ctypes.CDLL(str(place / "program.so")).launch
            self._loaded[digest].restype = ctypes.c_char_p
        return self._loaded[digest]

    def _header_folder(self) -> Path:
        """The folder of the header of all programs, compiled once: it takes a third of their time
        else.
        """
        found = self._folder / "cuda_words.h.gch"
        if not found.exists():
            header = str(HERE / "cuda_words.h")
            self._run("-x", "c++-header", header, "-o", str(found), at=self._folder)
        return self._folder

    def _load_machine(self) -> None:
        """Compile what runs all programs, once, and load it for all to find: linking it with each
        would take a third of their time.
        """
        found = self._folder / "machine.so"
        if not found.exists():
            sources = sorted(str(path) for path in HERE.glob("*.cpp"))
            flags = ("-O2", "-fvisibility=default", "-shared")
            self._run(*flags, *sources, "-o", str(found), at=self._folder)
            ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)

    def _run(self, *arguments: str, at: Path) -> None:
        command = [self._command, *FLAGS, *arguments]
        done = subprocess.run(
            command, cwd=at, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr


def compiler_here() -> str | None:
    """The command of an installed C++ compiler."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


class EmulatedProgram:
    """A CudaProgram that runs on CPU tensors."""

    def __init__(self, path: Path, name: str, compiler: Compiler, seed: int = 0) -> None:
        self._path = path
        self._name = name
        self._compiler = compiler
        self._seed = (
            seed  # seeds the order in which programs and lanes run, which differs each time
        )

    def launch(
        self,
        device: torch.device,
        constants: Mapping[str, int],
        wanted: LaunchShape,
        arguments: Sequence[Tensor | int | float | None],
    ) -> None:
        """Run the program to its end. Raises Fault."""
        assert device.type == "cpu" and wanted.num_threads % LANES == 0
        assert wanted.num_programs % wanted.cluster == 0, "clusters are whole"
        function = self._compiler.function(self._path, self._name, constants)
        self._seed += 1
        spaces = _spaces(arguments)
        values = [_value(each, spaces) for each in arguments]
        ranges = [space.range() for space in spaces.values()]
        told = function(
            ctypes.byref(
                _Launch(
                    wanted.num_programs,
                    wanted.num_threads,
                    wanted.shared_bytes,
                    wanted.cluster,
                    self._seed,
                    len(ranges),
                    (_Range * len(ranges))(*ranges),
                )
            ),
            (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values)),
        )
        if told:
            raise Fault(f"{self._name}: {told.decode()}")
        for space in spaces.values():
            if not space.take_back():
                raise Fault(f"{self._name}: has written outside of a tensor")


class _Space:
    """A tensor's storage while programs run: a copy between guard zones of NaN, which must not be
    written.
    """

    def __init__(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._begin = storage.data_ptr()
        self._own = torch.empty(0, dtype=torch.uint8).set_(storage)
        self._copy = torch.full((len(self._own) + 2 * BESIDE_BYTES,), 0xFF, dtype=torch.uint8)
        self._inner.copy_(self._own)

    @property
    def _inner(self) -> Tensor:
        return self._copy[BESIDE_BYTES:-BESIDE_BYTES]

    def place(self, tensor: Tensor) -> int:
        return self._inner.data_ptr() + tensor.data_ptr() - self._begin

    def range(self) -> _Range:
        return _Range(self._inner.data_ptr(), self._inner.data_ptr() + len(self._own))

    def take_back(self) -> bool:
        """Copy it back; return whether the guard zones are intact."""
        self._own.copy_(self._inner)
        beside = self._copy[:BESIDE_BYTES], self._copy[-BESIDE_BYTES:]
        return all(bool((each == 0xFF).all()) for each in beside)


def _spaces(arguments: Sequence[Tensor | int | float | None]) -> dict[int, _Space]:
    """By address of the storage, as views share one."""
    tensors = [each for each in arguments if isinstance(each, Tensor)]
    return {each.untyped_storage().data_ptr(): _Space(each) for each in tensors}


def _value(argument: Tensor | int | float | None, spaces: Mapping[int, _Space]) -> Any:
    match argument:
        case Tensor():
            space = spaces[argument.untyped_storage().data_ptr()]
            return ctypes.c_void_p(space.place(argument))
        case None:
            return ctypes.c_void_p(0)
        case float():
            return ctypes.c_float(argument)
        case _:
            return ctypes.c_int(argument)
