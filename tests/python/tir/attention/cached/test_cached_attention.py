"""Attention with a cache against float64: attributes, lengths around the edges of pages, what was never written."""

import functools

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from marks import in_turns
from relax_hetero.errors import EncodingError
from relax_hetero.target.cpu_target import cpu_target_of
from relax_hetero.tir.attention.cached.cached_attention import cached_attention_kernel
from relax_hetero.transform.encode.kernel_problems import cached_attention_problem
from tir.attention.cached.cached_cases import Cache, Case, compiled, module
from tir.products_of import AVX2

SLOTS, MOST, CHUNK, DECODE = 8, 6, 100, 8
LENGTHS = (0, 1, 63, 64, 65, 300, 17)
"""Lengths of the sequences before a decode."""

CASES = [
    Case(),
    Case(heads=8, kv_heads=2, rotary="halves", turned=64, window=70),
    Case(heads=6, kv_heads=6, size=80, rotary="pairs", turned=80, norms="qk"),
    Case(heads=4, kv_heads=1, size=256, rotary="halves", turned=256, norms="qk", window=64, pages="float32"),
    Case(heads=4, kv_heads=2, size=128, softcap=5.0, rotary="halves", turned=32, pages="int8"),
    Case(heads=9, kv_heads=1, size=72, norms="k", rotary="pairs", turned=24, window=1),
    Case(heads=2, kv_heads=2, size=64, norms="q", dtype="float16", pages="float32", scale=0.3),
    Case(heads=8, kv_heads=2, size=80, softcap=30.0, window=130, pages="int8", rotary="pairs", turned=16),
    Case(heads=10, kv_heads=2, size=40, norms="k", window=90, pages="bfloat16", dtype="bfloat16", sinks=True),
    Case(heads=16, size=72, rotary="pairs", turned=16, window=70, shared_values=56),
    Case(heads=6, kv_heads=2, size=80, norms="k", rotary="halves", turned=80, pages="int8", shared_values=80),
]
TARGETS = [
    "llvm",
    '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1}',
    '{"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 5}',
    '{"kind": "llvm", "mcpu": "x86-64", "num-cores": 2}',
]


@functools.cache
def machine(case, rows, count, target):
    return compiled(Case(**{**case.__dict__, "rows": rows}), count, SLOTS, MOST, target)


def filled(case, target):
    """A cache with sequences of `LENGTHS`, written by chunks whose every row was checked."""
    cache = Cache(case, SLOTS, MOST, 7, target)
    for slot, length in enumerate(LENGTHS):
        while cache.length(slot) < length:
            first = cache.length(slot)
            count = min(CHUNK, length - first)
            rest = CHUNK - count
            inputs = cache.inputs([slot] * count + [-1] * rest, [*range(first, first + count), *[0] * rest])
            cache.check(inputs, cache.call(machine(case, "chunk", CHUNK, target), inputs))
    return cache


@pytest.mark.parametrize("target", TARGETS[:1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_then_decode(case, target):
    """Every row of chunks, and of decodes after them, is the attention of float64 to what the pages hold."""
    check(case, target)


def check(case, target):
    cache = filled(case, target)
    for _ in range(3):
        slots = [*range(len(LENGTHS)), -1]
        positions = [cache.length(slot) for slot in slots[:-1]] + [0]
        order = cache.rng.permutation(len(slots))
        inputs = cache.inputs([slots[i] for i in order], [positions[i] for i in order])
        cache.check(inputs, cache.call(machine(case, "decode", DECODE, target), inputs))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("case", "target"), in_turns(CASES[3:6] + CASES[8:], TARGETS[1:]), ids=str)
def test_instruction_sets(case, target):
    """The same check on targets with other vector widths and core counts."""
    check(case, target)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_several_rows_of_one_sequence(case):
    """In any order, since units run at the same time: each row reads the keys of the others before it."""
    cache = filled(case, "llvm")
    lengths = {slot: cache.length(slot) for slot in (5, 2)}
    rows = [(5, 3), (2, 1), (5, 2), (5, 1), (2, 0), (5, 0), (-1, 0), (-1, 0)]
    inputs = cache.inputs([slot for slot, _ in rows], [lengths.get(slot, 0) + ahead for slot, ahead in rows])
    cache.check(inputs, cache.call(machine(case, "decode", DECODE, "llvm"), inputs))


def test_splits():
    """One row of one head of keys, more cores than that: parts of the keys are merged."""
    case, target = Case(size=64, window=0, sinks=True), '{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 3}'
    cache = filled(case, target)
    for slot in (5, 0, 6, 3):
        inputs = cache.inputs([slot], [cache.length(slot)])
        cache.check(inputs, cache.call(machine(case, "decode", 1, target), inputs))


@pytest.mark.parametrize(("cores", "count"), [(2, 1), (64, 2)])
def test_batch_sizes_share_a_kernel_unless_parts_are_merged(cores, count):
    target = f'{{"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": {cores}}}'
    mods = [module(Case(rows="decode"), rows, None, SLOTS, MOST, target) for rows in (4, DECODE)]
    mods[0]["other"] = mods[1]["main"].with_attr("global_symbol", "other")
    functions = rh.transform.MaterializeEncodings()(mods[0]).functions.values()
    assert sum(isinstance(func, tvm.tirx.PrimFunc) for func in functions) == count


def test_pages_that_are_not_there():
    """Rows out of bounds and pages without a number write nothing, and give finite numbers."""
    case = Case(rows="decode")
    cache = Cache(case, SLOTS, MOST, 3)
    inputs = cache.inputs([-1, -1, -1, -1, -1, -1, -1, -1], [0] * DECODE)
    inputs.sequences[:] = [-1, SLOTS, SLOTS + 7, 0, 1, 2, 3, -5]
    inputs.positions[:] = [0, 0, 5, MOST * 64, -1, 10**9, 3, 3]
    inputs.table[3, 0] = 10**6
    before = cache.pages.copy()
    out = cache.call(machine(case, "decode", DECODE, "llvm"), inputs)
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(cache.pages.view("uint16"), before.view("uint16"))


def test_keys_in_another_order():
    """Kernels of CPUs read keys in lanes; those of GPUs have other orders."""
    call = module(Case(), 1, 4, 1, 4, "llvm")["main"].body.blocks[0].bindings[0].value
    problem = cached_attention_problem(call, call.ty.fields[0], "rows")
    with pytest.raises(EncodingError, match="keys of pages in rows on avx2: expected lanes"):
        cached_attention_kernel(problem, cpu_target_of(AVX2))


@pytest.mark.parametrize("pages", ["int8", "float16"])
def test_a_target_of_scalars(pages):
    """A kernel without vectors is there for targets outside of the tables."""
    target = '{"kind": "c"}'
    case = Case(heads=4, kv_heads=2, size=24, rotary="halves", turned=24, norms="qk", softcap=3.0, pages=pages)
    cache, kernel = Cache(case, 3, 4, 0, target), compiled(case, 3, 3, 4, target)
    for position in range(3):
        inputs = cache.inputs([0, 1, -1], [position, position, 0])
        cache.check(inputs, cache.call(kernel, inputs))
