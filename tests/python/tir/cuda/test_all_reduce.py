"""Sums of GPUs as their CUDA source computes them, in programs of several kernels that take turns at random.

`gpu_threads.hpp` runs the source on a CPU. Kernels are as those of GPUs, but blocks, and operands that are short, are
smaller. GPUs may be several kernels apart, so that slots are written again while others still read other ones.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from math import prod
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_walk

from relax_hetero.artifact import peer_layout
from relax_hetero.tir.core.builder import Function, int64
from relax_hetero.tir.cuda import all_reduce
from relax_hetero.tir.cuda.all_reduce import SENT_TILE, AllReduce, RankReduce, RowNorm, all_reduce_kernel, send_tile
from relax_hetero.tir.cuda.loops.launch import launch
from seeds import fresh_seed

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux") or not shutil.which("g++"), reason="no g++ on Linux"),
    pytest.mark.sampled(1),
]

SMALLER = {"_THREADS": 64, "_MAX_THREADS": 128, "_LONG_BLOCKS": 3, "_LL_BYTES": 8192}
CALLS = 3
HALF, FLOAT = RowNorm(1e-5, "float16"), RowNorm(1e-3, "float32")

# Of each kernel: shape, norm, whether there is a residual, the sum is kept, and tiles are sent.
PROGRAMS = {
    "short": (2, [((1036,), None, 0, 0, 0), ((3, 260), HALF, 0, 1, 0), ((2, 5, 34), FLOAT, 0, 0, 0)]),
    "long": (2, [((2, 4, 1030), None, 0, 0, 0), ((70, 132), HALF, 1, 1, 0), ((14, 2048), HALF, 0, 0, 0)]),
    "sent": (2, [((512, 256), HALF, 1, 1, 1), ((14, 260), FLOAT, 0, 1, 0)] * 2),
    "three": (3, [((7, 36), HALF, 0, 0, 0), ((384, 512), HALF, 1, 1, 1), ((2052,), None, 0, 0, 0)]),
    "four": (4, [((20, 132), FLOAT, 1, 1, 0), ((5, 20), HALF, 0, 1, 0)]),
}


def senders(sent, shape):
    """A kernel that sends all tiles, in any order."""
    function = Function("send", registers="local")
    with function:
        pointers = function.argument("x", shape, "float32"), function.argument("bases", [sent.ranks], "int64")
        with function.body(), launch(1, 64):
            tiles = np.indices(np.floor_divide(shape, SENT_TILE)).reshape(2, -1).T * SENT_TILE
            for origin in np.random.default_rng(sent.rank).permutation(tiles).tolist():
                addresses = [T.address_of(each[(0,) * len(each.shape)]) for each in pointers]
                send_tile(sent, shape, addresses, tuple(map(int64, origin)))
    return function.result


def launch_of(kernel, pointers):
    """A `Launch` in C++, with the names of the kernel's operands replaced, and the source that it calls."""
    grid, calls, sources = {}, [], set()
    structural_walk(
        kernel.body, (tirx.For, lambda loop: grid.update({loop.thread_binding.thread_tag: int(loop.extent)}))
    )

    def argument(value):
        if isinstance(value, tirx.Cast):
            return argument(value.value)
        if isinstance(value, tvm.ir.Call):
            return pointers[value.args[0].source.name]
        return f"{value.value!r}{'ll' if isinstance(value, tirx.IntImm) else 'f'}"

    def call(node):
        if node.op.name == "tirx.cuda.func_call":
            name, *arguments, source = node.args
            calls.append(f"{name.value}({', '.join(map(argument, arguments))});")
            sources.add(source.value)

    structural_walk(kernel.body, (tvm.ir.Call, call))
    return f"{{{grid['blockIdx.x']}, {grid['threadIdx.x']}, [=] {{ {' '.join(calls)} }}}}", *sources


def on_cpu(source):
    """CUDA C++ for `gpu_threads.hpp`: statements of PTX are calls of functions, and each block has shared memory."""

    def call(statement):
        name = re.search(r"[a-z]\w*(\.\w+)+", statement[0])[0]
        operands = re.findall(r'"=?[a-z]"\(((?:[^()]|\([^()]*\))*)\)', statement[0])
        return f"{name.replace('.', '_')}({', '.join(operands)});"

    source = re.sub(r"asm(?: volatile)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\);", call, source)
    shared = r"static \1 all_\2[MAX_BLOCKS][\3]; \1* \2 = all_\2[current->block->number];"
    return re.sub(r"__shared__ (\w+) (\w+)\[(\d+)\];", shared, source)


class Program:
    """Kernels of GPUs that are called in a row."""

    def __init__(self, name, ranks, kernels):
        self.name, self.ranks, self.kernels, self.sources = name, ranks, kernels, set()
        self.reduces = [AllReduce(shape, ranks, norm, bool(residual)) for shape, norm, residual, *_ in kernels]
        self.slot_bytes = max(reduce.slot_bytes for reduce in self.reduces)
        self.operands, self.launches = [], []
        slots = all_reduce.slots_of(len(kernels))
        for number, (reduce, (shape, _, _, keeps, sends)) in enumerate(zip(self.reduces, kernels, strict=True)):
            slot = slots[number]
            for rank in range(ranks):
                after = ((1,), "float32")
                kernel = all_reduce_kernel(reduce, rank, slot, self.slot_bytes, after, bool(keeps), bool(sends))
                buffers = list(kernel.params)
                begin = len(self.operands)
                pointers = {buffer.name: f"Pointer{{p[{begin + i}]}}" for i, buffer in enumerate(buffers)}
                self.operands += [
                    (number, rank, buffer.name, [int(extent) for extent in buffer.shape], str(buffer.dtype))
                    for buffer in buffers
                ]
                own = RankReduce(reduce, rank, bool(keeps), slot, self.slot_bytes)
                for each in [senders(own.sent, shape), kernel] if sends else [kernel]:
                    text, source = launch_of(each, pointers)
                    self.launches.append((rank, text))
                    self.sources.add(source)

    @property
    def text(self):
        """The program as a function in C++."""
        lines = [f"gpus[{rank}].push_back({text});" for rank, text in self.launches]
        head = f'extern "C" int run_{self.name}(void** p, int calls, int gpus_that_run, unsigned seed) {{'
        gpus = f"std::vector<std::vector<Launch>> gpus({self.ranks});"
        loop = f"for (; calls--; p += {len(self.operands)}) {{"
        return "\n".join([head, gpus, loop, *lines, "}", "gpus.resize(gpus_that_run);", "return run(gpus, seed); }"])

    def arrays(self, rng):
        """Operands of a call, and poisoned results, by kernel, rank and name."""
        scales, arrays = {}, {}
        for number, rank, name, shape, dtype in self.operands:
            values = np.full(shape, np.nan, dtype) if dtype != "int64" else None
            if name in ("x", "residual"):
                rows = prod(self.reduces[number].shape[:-1])
                scale = scales.setdefault(number, 10.0 ** rng.integers(-6, 12, rows))
                scale[1:3] = [0, 1e-36][: rows - 1]
                own = np.split(scale, self.ranks)[rank] if name == "residual" else scale
                values = (rng.standard_normal((len(own), shape[-1])) * own[:, None]).reshape(shape).astype(dtype)
            if name == "weight":
                values = arrays.get((number, 0, name), rng.uniform(-2, 2, shape).astype(dtype))
            arrays[number, rank, name] = values
        return arrays


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALLER.items():
            patch.setattr(all_reduce, name, value)
        patch.setattr(all_reduce, "_OPERANDS", 2 * SMALLER["_LL_BYTES"] + all_reduce._SENT_BYTES)
        made = {name: Program(name, *how) for name, how in PROGRAMS.items()}
        (source,) = set().union(*(program.sources for program in made.values()))
        folder = tmp_path_factory.mktemp("sums")
        header = Path(__file__).with_name("gpu_threads.hpp")
        texts = [f'#include "{header}"', on_cpu(source), *(program.text for program in made.values())]
        (folder / "sums.cpp").write_text("\n".join(texts))
        options = "-std=c++17 -O1 -w -U_FORTIFY_SOURCE -ffp-contract=off -fPIC -shared".split()
        subprocess.run(["g++", *options, folder / "sums.cpp", "-o", folder / "sums.so"], check=True)
        yield made, ctypes.CDLL(str(folder / "sums.so"))


def run(programs, name, gpus, seed):
    """Call a program three times on GPUs whose memory is as at first; returns its end and the calls' arrays."""
    made, library = programs
    program, rng = made[name], np.random.default_rng(seed)
    memory = [
        np.zeros(peer_layout.memory_bytes(program.ranks, program.slot_bytes), "uint8") for _ in range(program.ranks)
    ]
    for each in memory:  # operands show if they are read before they are there
        for slot in range(peer_layout.SLOTS * program.ranks):
            begin = peer_layout.data_offset(0, program.ranks, program.slot_bytes) + slot * program.slot_bytes
            each[begin + all_reduce._OPERANDS : begin + program.slot_bytes] = 0xFF
    addresses = np.array([each.ctypes.data for each in memory], "int64")
    calls = [program.arrays(rng) for _ in range(CALLS)]
    pointers = [(addresses if each is None else each).ctypes.data for call in calls for each in call.values()]
    end = getattr(library, f"run_{name}")((ctypes.c_void_p * len(pointers))(*pointers), CALLS, gpus, seed)
    return end, calls


@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(programs, name, order):
    seed = fresh_seed()
    end, calls = run(programs, name, PROGRAMS[name][0], seed)
    assert end == 0
    ranks = range(PROGRAMS[name][0])
    for call in calls:
        for number, reduce in enumerate(programs[0][name].reduces):
            parts = [call[number, rank, "x"].astype("float64") for rank in ranks]
            if reduce.has_residual:
                rows = [call[number, rank, "residual"] for rank in ranks]
                parts.append(np.concatenate(rows).reshape(reduce.shape).astype("float64"))
            total, bound = sum(parts), sum(map(abs, parts))
            # Rounding of each part, and what is below the smallest float16 beside the largest of a row.
            bound += bound.max(-1, keepdims=True) * 1e-5
            norm, rounding = reduce.norm, 2.0**-20
            if norm is not None:
                rounding = 2.0**-10 if norm.dtype == "float16" else rounding
                weight = call[number, 0, "weight"] / np.sqrt((total**2).mean(-1, keepdims=True) + norm.eps)
                expected, limit = total * weight, bound * abs(weight) * rounding + 6e-8
            else:
                expected, limit = total, bound * rounding
            for rank in ranks:
                got = call[number, rank, "out"]
                assert (abs(got.astype("float64") - expected) <= limit).all(), (number, rank)
                assert np.array_equal(got, call[number, 0, "out"])
                if (number, rank, "total") in call:
                    kept = call[number, rank, "total"]
                    own = np.s_[:] if reduce.is_short else np.s_[rank * len(kept) : (rank + 1) * len(kept)]
                    rows = total.reshape(-1, total.shape[-1])[own], bound.reshape(-1, total.shape[-1])[own]
                    assert (abs(kept.reshape(rows[0].shape) - rows[0]) <= rows[1] * rounding).all(), (number, rank)


def test_a_gpu_that_waits_for_a_minute_traps(programs):
    """All others have sent, but one has not begun."""
    assert run(programs, "sent", 1, 3)[0] == run(programs, "long", 1, 3)[0] == 1
