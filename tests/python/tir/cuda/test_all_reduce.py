"""Sums of GPUs as their CUDA source computes them, in programs of several kernels that take turns at random.

`gpu_threads.hpp` runs the source on a CPU. Kernels are as those of GPUs, but blocks, and operands that are short, are
smaller. GPUs may be several kernels apart, so that slots are written again while others still read other ones.
"""

import ctypes
import re
import shutil
import subprocess
import sys
from itertools import chain, product
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
from relax_hetero.tir.cuda.all_reduce import (
    SENT_TILE,
    AllReduce,
    RankReduce,
    RowNorm,
    all_reduce_kernel,
    send_tile,
    send_words,
    word_places,
)
from relax_hetero.tir.cuda.loops.launch import launch
from seeds import fresh_seed

needs_compiler = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("g++"), reason="no g++ on Linux"
)
pytestmark = [needs_compiler, pytest.mark.sampled(1)]

SMALLER = {"_THREADS": 64, "_MAX_THREADS": 128, "_LONG_BLOCKS": 3, "LAMPORT_BYTES": 8192}
HEADER = Path(__file__).with_name("gpu_threads.hpp")
CALLS = 3
HALF, FLOAT = RowNorm(1e-5, "float16"), RowNorm(1e-3, "float32")
LAYER, HALF_LAYER = RowNorm(1e-5, "float32", is_centered=True), RowNorm(1e-3, "float16", is_centered=True)

# Of each kernel: shape, norm, whether there are rows of a residual (1) or all of it (2), the sum is kept, and products
# send. Then numbers of kernels of functions that are called in turn, if these are several.
PROGRAMS = {
    "short": (2, [((1036,), None, 0, 0, 0), ((3, 260), HALF, 0, 1, 0), ((140, 12), LAYER, 0, 1, 0)]),
    "words": (2, [((4, 132), None, 0, 0, 0), ((2, 68), HALF, 0, 1, 1), ((204,), None, 0, 0, 1)]),
    "long": (2, [((2, 4, 1030), None, 0, 0, 0), ((70, 132), HALF, 1, 1, 0), ((14, 2048), HALF_LAYER, 0, 0, 0)]),
    "sent": (2, [((512, 256), HALF, 1, 1, 1), ((2, 7, 260), FLOAT, 2, 1, 0)] * 2),
    "three": (3, [((3, 36), HALF, 0, 0, 1), ((384, 512), HALF, 2, 1, 1), ((2052,), None, 0, 0, 0)]),
    "turns": (2, [((256, 256), HALF, 2, 1, 1), ((2, 68), HALF, 0, 0, 1)] + [((256, 256), HALF, 0, 1, 1)] * 3, (3, 2)),
    "eight": (8, [((8, 260), HALF, 0, 0, 0), ((8, 260), FLOAT, 1, 1, 0)]),  # a row for each GPU
    "four": (4, [((20, 132), LAYER, 1, 1, 0), ((5, 20), LAYER, 0, 1, 1), ((1, 1540), HALF, 0, 1, 0)]),
}


def senders(sent, reduce):
    """A kernel that sends all tiles, or words, in any order."""
    function, shape, rng = Function("send", registers="local"), reduce.shape, np.random.default_rng(sent.rank)
    with function:
        x, bases = function.argument("x", shape, "float32"), function.argument("bases", [sent.ranks], "int64")
        with function.body(), launch(1, 1 if reduce.is_short else 64):
            if reduce.is_short:
                places = word_places(sent, bases)
                for start in rng.permutation(range(0, reduce.count, 4)).tolist():
                    values = [x[np.unravel_index(start + i, shape)] for i in range(4)]
                    send_words(places, values, int64(start))
            else:
                tiles = np.indices(np.floor_divide(shape, SENT_TILE)).reshape(2, -1).T * SENT_TILE
                addresses = [T.address_of(each[(0,) * len(each.shape)]) for each in (x, bases)]
                for origin in rng.permutation(tiles).tolist():
                    send_tile(sent, shape, addresses, tuple(map(int64, origin)))
    return function.result


def launch_of(kernel, pointers):
    """A `Launch` in C++, with pointers for the names of the kernel's operands; rows in registers have names."""
    grid, names, lines = {}, {}, []

    def place(value):
        at = np.ravel_multi_index([int(i) for i in value.indices], [int(extent) for extent in value.source.shape])
        nbytes = at * np.dtype(str(value.source.dtype)).itemsize
        return f"Pointer{{(char*){pointers[value.source.name]}.address + {nbytes}}}"

    def text(value):
        if isinstance(value, tirx.Add):
            return f"({text(value.a)} + {text(value.b)})"
        if isinstance(value, tvm.ir.TensorLoad):
            kind = {"int64": "long long", "float32": "float"}[str(value.source.dtype)]
            return f"*({kind}*){place(value)}.address"
        if isinstance(value, tvm.ir.Call):
            buffer = value.args[0].source
            if buffer.name in pointers:
                return place(value.args[0])
            if buffer not in names:
                names[buffer] = f"row{len(names)}"
                lines.append(f"float4 {names[buffer]}[{buffer.shape[0]}];")
            return names[buffer]
        if isinstance(value, tirx.Cast):
            return text(value.value)
        return names[value] if value in names else repr(value.value)

    def call(node):
        if node.op.name == "tirx.cuda.func_call":
            arguments = ", ".join(map(text, node.args[1:-1]))
            lines.append(f"{node.args[0].value}({arguments});")

    def loop(node):
        grid[node.thread_binding.thread_tag] = int(node.extent)

    def bind(node):
        names[node.var] = f"v{len(names)}"
        lines.append(f"auto {names[node.var]} = {text(node.value)};")

    structural_walk(kernel.body, [(tirx.Bind, bind), (tvm.ir.Call, call), (tirx.For, loop)])
    return f"{{{grid['blockIdx.x']}, {grid['threadIdx.x']}, [=] {{ {' '.join(lines)} }}}}"


def on_cpu(source):
    """CUDA C++ for `gpu_threads.hpp`: statements of PTX are calls of functions, and each block has shared memory."""

    def call(statement):
        name = re.search(r"[a-z]\w*(\.\w+)+", statement[0])[0]
        operands = re.findall(r'"=?[a-z]"\(((?:[^()]|\([^()]*\))*)\)', statement[0])
        return f"{name.replace('.', '_')}({', '.join(operands)});"

    source = re.sub(r"asm(?: volatile)?\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\);", call, source)
    shared = r"static \1 all_\2[MAX_BLOCKS][\3]; \1* \2 = all_\2[current->block->number];"
    return re.sub(r"__shared__ (\w+) (\w+)\[(\w+)\];", shared, source)


def compiled(folder, source, functions):
    """A library of functions in C++ that launch kernels of a CUDA source."""
    check = subprocess.run(["g++", "-fsyntax-only", "-xc++", "-"], input=b"_Float16 x;", stderr=subprocess.DEVNULL)
    if check.returncode:
        pytest.skip("this g++ lacks _Float16")
    (folder / "kernels.cpp").write_text("\n".join([f'#include "{HEADER}"', on_cpu(source), functions]))
    options = "-std=c++17 -O1 -w -fPIC -shared".split()
    subprocess.run(["g++", *options, folder / "kernels.cpp", "-o", folder / "kernels.so"], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


class Program:
    """Kernels of GPUs that are called in a row: a function in C++, and its operands by kernel and rank."""

    def __init__(self, name, ranks, kernels, functions=()):
        self.reduces = [AllReduce(shape, ranks, norm, each > 0, each > 1) for shape, norm, each, *_ in kernels]
        self.ranks, self.slot_bytes = ranks, max(reduce.slot_bytes for reduce in self.reduces)
        self.operands, lines = [], []
        slots = list(chain.from_iterable(map(all_reduce.slots_of, functions or [len(kernels)])))
        for number, (reduce, slot, (*_, keeps, sends)) in enumerate(zip(self.reduces, slots, kernels, strict=True)):
            for rank in range(ranks):
                own = RankReduce(reduce, rank, bool(keeps), slot, self.slot_bytes)
                after = ((1,), "float32")
                kernel = all_reduce_kernel(reduce, rank, slot, self.slot_bytes, after, own.keeps_sum, bool(sends))
                pointers = {
                    each.name: f"Pointer{{p[{len(self.operands) + i}]}}" for i, each in enumerate(kernel.params)
                }
                self.operands += [(number, rank, param) for param in kernel.params]
                for each in [senders(own.sent, reduce), kernel] if sends else [kernel]:
                    lines.append(f"gpus[{rank}].push_back({launch_of(each, pointers)});")
        head = f'extern "C" int run_{name}(void** p, int calls, int gpus_that_run, unsigned seed) {{'
        loop = f"std::vector<std::vector<Launch>> gpus({ranks}); for (; calls--; p += {len(self.operands)}) {{"
        self.text = "\n".join([head, loop, *lines, "} gpus.resize(gpus_that_run); return run(gpus, seed); }"])

    def arrays(self, rng):
        """Operands of a call, and poisoned results, by kernel, rank and name; None for the addresses."""
        arrays = {}
        scales = [10.0 ** rng.integers(-6, 12, prod(reduce.shape[:-1])) for reduce in self.reduces]
        for number, rank, param in self.operands:
            scale, shape = scales[number], [int(extent) for extent in param.shape]
            values = None if param.name == "bases" else np.full(shape, np.nan, str(param.dtype))
            if param.name in ("x", "residual"):
                scale[1:3] = [0, 1e-36][: len(scale) - 1]  # no power of two scales these to 2^14
                scale = scale if prod(shape[:-1]) == len(scale) else np.split(scale, self.ranks)[rank]
                values = (rng.normal(1, 1, (len(scale), shape[-1])) * scale[:, None]).reshape(shape)
                values = values.astype("float32")
            if param.name == "residual" and self.reduces[number].is_residual_whole:
                values = arrays.get((number, 0, "residual"), values)
            if param.name in ("weight", "bias"):
                values = arrays.get((number, 0, param.name), rng.uniform(-2, 2, shape).astype("float32"))
            arrays[number, rank, param.name] = values
        return arrays


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALLER.items():
            patch.setattr(all_reduce, name, value)
        for module in (all_reduce, peer_layout):
            flags = peer_layout.RESULT_LINE_BYTES + peer_layout.SENT_FLAGS_BYTES
            patch.setattr(module, "LONG_OPERANDS", SMALLER["LAMPORT_BYTES"] + flags)
        made = {name: Program(name, *how) for name, how in PROGRAMS.items()}
        functions = "\n".join(program.text for program in made.values())
        yield made, compiled(tmp_path_factory.mktemp("sums"), all_reduce.SOURCE, functions)


def placed(call, addresses):
    """The arrays of a call: a result is in the memory of the last sum's operand, if that is large enough.

    So no GPU may write to it before the kernel of its own GPU has begun.
    """
    operands = {key: each.copy() for key, each in call.items() if key[2] == "x"}
    for (number, rank, name), each in call.items():
        last = operands.get((number - 1, rank, "x"))
        if name == "out" and last is not None and last.nbytes >= each.nbytes:
            call[number, rank, name] = last.view(each.dtype).ravel()[: each.size].reshape(each.shape)
    return [addresses if each is None else operands.get(key, each) for key, each in call.items()]


def run(programs, name, gpus, seed, change=lambda call: None):
    """Call a program three times on GPUs whose memory is as at first; returns its end and the calls' arrays.

    Places of words are all zero afterwards.
    """
    program, rng = programs[0][name], np.random.default_rng(seed)
    nbytes = peer_layout.memory_bytes(program.ranks, program.slot_bytes)
    memory = np.full((program.ranks, nbytes), 0xFF, "uint8")  # operands that are read before they are there are NaN
    for begin, size in peer_layout.initial_zeros(program.ranks, program.slot_bytes):
        memory[:, begin : begin + size] = 0
    addresses = np.array([each.ctypes.data for each in memory], "int64")
    calls = [program.arrays(rng) for _ in range(CALLS)]
    for call in calls:
        change(call)
    arrays = [placed(call, addresses) for call in calls]
    pointers = [each.ctypes.data for each in chain(*arrays)]
    end = programs[1][f"run_{name}"]((ctypes.c_void_p * len(pointers))(*pointers), CALLS, gpus, seed)
    slots = memory[:, peer_layout.data_offset(0, program.ranks, program.slot_bytes) :]
    words = slots.reshape(program.ranks, -1, program.slot_bytes)[..., : all_reduce.LAMPORT_BYTES]
    assert gpus < program.ranks or not words.any()
    return end, calls


@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers(programs, name, order):
    ranks = range(PROGRAMS[name][0])
    end, calls = run(programs, name, len(ranks), fresh_seed())
    assert end == 0
    for call, (number, reduce) in product(calls, enumerate(programs[0][name].reduces)):
        parts = [call[number, rank, "x"].astype("float64").reshape(-1, reduce.width) for rank in ranks]
        if reduce.has_residual:
            given = [call[number, rank, "residual"] for rank in ranks][: 1 if reduce.is_residual_whole else None]
            parts.append(np.concatenate(given).astype("float64").reshape(-1, reduce.width))
        total, bound = sum(parts), sum(map(abs, parts))
        bound += bound.max(-1, keepdims=True) * 1e-5  # parts that are below the smallest float16
        norm = reduce.norm
        rounding = 2.0**-10 if norm is not None and norm.dtype == "float16" else 2.0**-20
        bound = bound * rounding + 2.0**-134  # the smallest float16, divided by the largest power of two
        expected, limit = total, bound
        if norm is not None:
            bias = call.get((number, 0, "bias"), 0.0)
            mean = total.mean(-1, keepdims=True) * norm.is_centered
            factor = call[number, 0, "weight"] / np.sqrt(((total - mean) ** 2).mean(-1, keepdims=True) + norm.eps)
            expected = (total - mean) * factor + bias
            limit = (bound + bound.mean(-1, keepdims=True) * norm.is_centered) * abs(factor) + rounding * abs(bias)
        for rank in ranks:
            out = call[number, rank, "out"]
            np.testing.assert_array_equal(out, call[number, 0, "out"])
            tiny = 4 * float(np.finfo(out.dtype).smallest_subnormal)
            assert (abs(out.reshape(total.shape) - expected) <= limit + tiny).all(), rank
            if (number, rank, "total") in call:
                kept = call[number, rank, "total"].reshape(-1, reduce.width)
                own = np.s_[: len(kept)] if reduce.is_short else np.s_[rank * len(kept) : (rank + 1) * len(kept)]
                assert (abs(kept - total[own]) <= bound[own]).all(), (number, rank)


def test_words_of_any_number_arrive(programs):
    """Zeros of both signs, which are sent as one, and numbers that are neither zero nor normal."""
    numbers = np.array([0, -0.0, 1e-45, -1e-40, 1, -np.inf, np.nan, 3e38], "float32")
    pairs = np.stack(np.meshgrid(numbers, numbers)).reshape(2, -1)

    def change(call):
        for (number, rank, operand), array in call.items():
            if operand == "x" and programs[0]["words"].reduces[number].norm is None:
                array[...] = np.resize(pairs[rank], array.size).reshape(array.shape)

    end, calls = run(programs, "words", 2, fresh_seed(), change)
    assert end == 0
    plain = [number for number, reduce in enumerate(programs[0]["words"].reduces) if reduce.norm is None]
    for call, number in product(calls, plain):
        with np.errstate(over="ignore", invalid="ignore"):
            expected = call[number, 0, "x"] + call[number, 1, "x"]
        for rank in range(2):
            np.testing.assert_array_equal(call[number, rank, "out"], expected)
            np.testing.assert_array_equal(*(call[number, each, "out"].view("uint32") for each in (0, rank)))


def test_a_gpu_that_waits_for_a_minute_traps(programs):
    """The other one does not begin."""
    assert run(programs, "sent", 1, 3)[0] == run(programs, "long", 1, 3)[0] == 1
