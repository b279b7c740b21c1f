"""Compiles programs for H100s on a machine that has none, and reads what came of it.

    mesh(8)                           eight H100s, as ("data", "model") = (1, 8)
    compile_for(mesh, f, arguments)   f compiled for them: memory, HLO, Mosaic kernels

Nothing runs: this shows that a program compiles for sm_90a, fits, and communicates as it should.

Mosaic leaves, for each kernel that it compiles, the PTX, the log of ptxas and the MLIR in the
folder that MOSAIC_GPU_DUMP_TO names. A kernel is compiled once a process and leaves nothing when
it is called again, so the hashes that the HLO calls kernels by tell which are new: a new one
without a dump is an error.

Shared memory. The log of ptxas knows static shared memory only, of which Mosaic has one byte. A
kernel's buffers and barriers lie in dynamic shared memory, whose size is an operand of the
launch: `gpu.launch ... dynamic_shared_memory_size %c92232_i32`, in the first MLIR of the dump.
(`smem_scratch_bytes` in the dump's resources leaves out the barriers.)
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

MEMORY = 80e9
"""Bytes of one device."""
SHARED_MEMORY = 232_448
"""Bytes that one block may ask for: 227 KiB."""

MOSAIC_CALL = 'custom_call_target="mosaic_gpu'
"""Stands in the HLO where a Mosaic kernel is called."""

_CONFIG = Path(__file__).with_name("h100_sxm.txtpb")
_OPTIONS = {"xla_gpu_enable_cub_radix_sort": False}  # asks the device which sort is faster


class Kernel(NamedTuple):
    """A compiled Mosaic kernel."""

    name: str
    """Of its entry function."""
    registers: int
    """A thread."""
    shared_memory: int
    """Bytes a block, static and dynamic."""
    spills: int
    """Bytes of spill stores and loads."""
    wgmma: int
    """`wgmma.mma_async` instructions in the PTX."""
    tma: int
    """`cp.async.bulk.tensor` instructions in the PTX."""


class Program(NamedTuple):
    """A program compiled for the devices of a mesh."""

    memory: Any
    """`CompiledMemoryStats`: of one device."""
    text: str
    """Its optimised HLO, for one device."""
    kernels: tuple[Kernel, ...]
    """The Mosaic kernels that it is the first in this process to call."""
    seconds: float
    """What tracing and compiling took."""

    @property
    def mosaic_calls(self) -> int:
        """Places that call a Mosaic kernel, of those seen before, too."""
        return self.text.count(MOSAIC_CALL)

    @property
    def used_bytes(self) -> int:
        """Bytes of one device: arguments, results that are not arguments, and scratch."""
        m = self.memory
        kept = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
        return kept + m.temp_size_in_bytes


def mesh(size: int) -> Mesh:
    """`size` H100s of one machine."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology=f"1x1x{size}", target_config=_CONFIG.read_text()
    )
    return Mesh(np.array(topology.devices).reshape(1, size), ("data", "model"))


def compile_for(
    mesh: Mesh, function: Callable[..., Any], arguments: Sequence[Any], **jit_options: Any
) -> Program:
    """`jit(function, **jit_options)` compiled for arguments that are `ShapeDtypeStruct`s with
    shardings on `mesh`; the mesh is in the context, as `jax.set_mesh` has it."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, _dumping_to(folder):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            traced = jax.jit(function, **jit_options).trace(*arguments)
            lowered = traced.lower(lowering_platforms=("cuda",))
            executable = lowered.compile(compiler_options=_OPTIONS)
        text = executable.as_text() or ""
        kernels = _new_kernels(text, Path(folder))
    seconds = time.perf_counter() - start
    return Program(executable.memory_analysis(), text, kernels, seconds)


@contextlib.contextmanager
def _dumping_to(folder: str) -> Iterator[None]:
    before = os.environ.get("MOSAIC_GPU_DUMP_TO")
    os.environ["MOSAIC_GPU_DUMP_TO"] = folder
    try:
        yield
    finally:
        if before is None:
            del os.environ["MOSAIC_GPU_DUMP_TO"]
        else:
            os.environ["MOSAIC_GPU_DUMP_TO"] = before


_seen: set[str] = set()
"""Hashes of the kernels that this process has compiled."""


def _new_kernels(text: str, folder: Path) -> tuple[Kernel, ...]:
    """The kernels that a program is the first to call: each must have left a dump."""
    called = set(re.findall(r'kernel_hash = "(.*?)", module = ', text, re.DOTALL))
    if bool(called) != bool(MOSAIC_CALL in text):
        raise AssertionError("the HLO does not name its Mosaic kernels by their hashes")
    logs = sorted(folder.glob("*.ptxas"))
    if len(logs) != len(called - _seen):
        raise AssertionError(f"{len(called - _seen)} new Mosaic kernels, {len(logs)} ptxas logs")
    _seen.update(called)
    return tuple(map(read_dump, logs))


def read_dump(log: Path) -> Kernel:
    """A kernel from its ptxas log and the PTX and MLIR beside it; what is missing is an error."""
    report, ptx = log.read_text(), log.with_suffix(".ptx").read_text()
    spills = _only(r"stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report, log)
    registers = _only(r"[Uu]sed (\d+) registers(?:.*?(\d+) bytes smem)?", report, log)
    name = _only(r"\.visible \.entry (\w+?)(?:_mosaic_gpu_kernel)?\(", ptx, log)[0]
    _only(r"\.target (sm_90a)", ptx, log)
    return Kernel(
        name=name,
        registers=int(registers[0]),
        shared_memory=int(registers[1] or 0) + _dynamic_shared_memory(log),
        spills=sum(map(int, spills)),
        wgmma=ptx.count("wgmma.mma_async"),
        tma=ptx.count("cp.async.bulk.tensor"),
    )


def _only(pattern: str, text: str, log: Path) -> tuple[str, ...]:
    """The groups of the only match."""
    found = list(re.finditer(pattern, text))
    if len(found) != 1:
        raise AssertionError(f"{log.name}: {len(found)} matches of {pattern!r}, not one")
    return found[0].groups()


def _dynamic_shared_memory(log: Path) -> int:
    """Bytes, from the launch of the kernel: the constant's name holds its value."""
    path = log.with_suffix(".mlir-passes.log")
    with path.open() as lines:
        for line in lines:
            if found := re.search(r"gpu\.launch .* dynamic_shared_memory_size %c(\d+)_i32", line):
                return int(found[1])
    raise AssertionError(f"{path.name}: no launch with a size of dynamic shared memory")


class Instruction(NamedTuple):
    """One HLO instruction's array; a result of several arrays makes several of these."""

    opcode: str
    """Without -start; an instruction that ends in -done is left out."""
    dtype: str
    dims: tuple[int, ...]
    scope: str
    """Where it comes from in the source, as far as known."""
    fused: bool
    """Inside a fusion, where a result need not be in memory."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)


def instructions(text: str) -> list[Instruction]:
    """All instructions of an HLO text. Of an asynchronous one, whose result also names its
    operands, only the last array is taken."""
    fusions = set(re.findall(r"calls=%?([\w.\-]+)", text))
    found, fused = [], False
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            fused = head[1] in fusions
        parts = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.+?) ([a-z][\w\-]*)\(", line)
        if parts is None or parts[2].endswith("-done"):
            continue
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", parts[1])
        if parts[2].endswith("-start"):
            arrays = arrays[-1:]
        scope = re.search(r'op_name="([^"]*)"', line)
        for dtype, dims in arrays:
            shape = tuple(int(n) for n in dims.split(",") if n)
            opcode = parts[2].removesuffix("-start")
            found.append(Instruction(opcode, dtype, shape, scope[1] if scope else "", fused))
    return found
