"""PrimFuncs of any form: one launch per statement, parallel where iterations are proven independent.

Before::

    for i in range(8):
        count: T.int64[1]
        count[0] = 0
        for j in range(100):
            if x[i, j] > 0: y[i, count[0]] = x[i, j]; count[0] = count[0] + 1

After, as every access of a written buffer has ``i`` in the same dimension::

    for block in T.thread_binding(1, "blockIdx.x"), thread in T.thread_binding(64, "threadIdx.x"):
        if thread < 8: ...                            # the body with i = thread

A statement whose outermost loop is not proven independent runs in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.script.ir_builder import tirx as T
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import VisitInterrupt, structural_equal, structural_map, structural_walk

from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, ceil_div, int64, plain_extent
from ...core.walks import replaced
from ...loops.stages import Load, loads, variables
from .arithmetic import for_cuda
from .launch import threads_for

# Independence: iterations of a loop are independent if no iteration accesses what another one writes.
#
# This is proven if all accesses of a written buffer have an index ``step * i + rest``, ``0 <= rest < step``, in the
# same dimension.

# Calls that may access memory invisible to this analysis.
_OPAQUE_CALLS = tuple(
    f"tirx.{name}" for name in ("call_packed", "call_extern", "address_of", "tvm_call_packed", "tvm_access_ptr")
)


def is_independent(loop: tirx.For) -> bool:
    """Return whether the iterations of a loop may run in parallel."""
    if loop.kind == tirx.ForKind.THREAD_BINDING or loop.step is not None:
        return False
    if loop.kind == tirx.ForKind.PARALLEL:
        return True
    if _has_opaque(loop.body):
        return False
    local_buffers = _allocated(loop.body)
    stores: list[tirx.BufferStore] = []
    loads: list[Any] = []
    structural_walk(loop.body, [(tirx.BufferStore, stores.append), (Load, loads.append)])
    written: dict[tirx.Buffer, list[Sequence[Expr]]] = {}
    for store in stores:
        if store.buffer not in local_buffers:
            written.setdefault(store.buffer, []).append(list(store.indices))
    for load in loads:
        if load.source in written:
            written[load.source].append(list(load.indices))
    loop_body = _LoopBody(loop)
    return all(loop_body.are_disjoint(accesses) for accesses in written.values())


def _has_opaque(body: tirx.Stmt) -> bool:
    def call(node: tvm.ir.Call) -> VisitInterrupt | None:
        is_op = isinstance(node.op, tvm.ir.Op)
        return VisitInterrupt(node) if not is_op or node.op.name in _OPAQUE_CALLS else None

    def stop(node: Any) -> VisitInterrupt:
        return VisitInterrupt(node)

    return structural_walk(body, [(tvm.ir.Call, call), (tirx.DeclBuffer, stop), (tirx.While, stop)]) is not None


def _allocated(body: tirx.Stmt) -> set[tirx.Var]:
    buffers: list[tirx.Var] = []
    structural_walk(body, (tirx.AllocBuffer, lambda a: buffers.append(a.buffer)))
    return set(buffers)


class _LoopBody:
    """Variables and ranges of the body of a loop."""

    def __init__(self, loop: tirx.For) -> None:
        self.var = loop.loop_var
        self._analyzer = Analyzer()
        self._inside: set[tirx.Var] = set()  # variables bound within the loop
        self._ranged: set[tirx.Var] = set()
        structural_walk(loop.body, [(tirx.For, self._loop), ((tirx.Bind, tirx.LetStmt, tirx.Let), self._bound)])

    def _loop(self, loop: tirx.For) -> None:
        self._inside.add(loop.loop_var)
        self._ranged.add(loop.loop_var)
        self._analyzer.bind(loop.loop_var, tvm.ir.Range.from_min_extent(loop.min, loop.extent))

    def _bound(self, bound: Any) -> None:
        self._inside.add(bound.var)

    def are_disjoint(self, accesses: Sequence[Sequence[Expr]]) -> bool:
        """Return whether different iterations access disjoint elements of a buffer."""
        ranks = {len(indices) for indices in accesses}
        return len(ranks) == 1 and any(self._disjoint_in([a[d] for a in accesses]) for d in range(ranks.pop()))

    def _disjoint_in(self, indices: Sequence[Expr]) -> bool:
        step: Expr | None = None
        base: Expr | None = None
        for index in indices:
            terms = detect_linear_equation(index, [self.var])
            if not terms or self.var in variables(terms[1]):
                return False
            factor, rest = terms
            if variables(factor) & self._inside or _reads(factor) or _reads(rest):
                return False
            if not self._analyzer.can_prove(factor > tirx.const(0, factor.ty.dtype)):
                return False
            free, own = self._split(rest)
            if free is None:
                return False
            if step is None:
                step, base = factor, free
            elif not (structural_equal(step, factor) and structural_equal(base, free)):
                return False
            zero = tirx.const(0, own.ty.dtype)
            if not (self._analyzer.can_prove(own >= zero) and self._analyzer.can_prove(own < step)):
                return False
        return step is not None

    def _split(self, rest: Expr) -> tuple[Expr | None, Expr]:
        """Split an offset into a loop-invariant term and a term of the inner loops."""
        names = [var for var in variables(rest) if var in self._inside]
        zero = tirx.const(0, rest.ty.dtype)
        if not names:
            return self._analyzer.simplify(rest), zero
        if any(var not in self._ranged for var in names):
            return None, zero
        terms = detect_linear_equation(rest, names)
        if not terms or variables(terms[-1]) & self._inside:
            return None, zero
        return self._analyzer.simplify(terms[-1]), self._analyzer.simplify(rest - terms[-1])


def _reads(expr: Expr) -> bool:
    return structural_walk(expr, (Load, VisitInterrupt)) is not None


_MAX_LOCAL_BYTES = 2048
"""Maximum bytes of a temporary in local memory; larger ones are in global memory."""


def write_statements(func: tirx.PrimFunc, gpu: GpuTarget) -> tirx.PrimFunc:
    """Write each statement of a function as a launch."""
    body, allocated = _lower_blocks(func)
    statements = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    if any(isinstance(s, (tirx.Bind, tirx.DeclBuffer)) for s in statements):
        statements = [body]
    allocated += [s.buffer for s in statements if isinstance(s, tirx.AllocBuffer)]
    statements = [s for s in statements if not isinstance(s, tirx.AllocBuffer)]
    launches = []
    for statement in statements:
        launch, hoisted = _launch(statement, gpu)
        launches.append(launch)
        allocated += hoisted
    inner = tirx.SeqStmt(launches) if len(launches) > 1 else launches[0]
    root = s_tir.SBlock([], [], [], "root", inner, None, allocated)
    return func.with_body(s_tir.SBlockRealize([], True, root)).with_attr("tirx.is_scheduled", True)


def _lower_blocks(func: tirx.PrimFunc) -> tuple[tirx.Stmt, list[tirx.Buffer]]:
    """Lower blocks; the body as loops and stores, and the buffers that the root block allocates."""
    root = func.body
    allocated: list[tirx.Buffer] = []
    if isinstance(root, s_tir.SBlockRealize) and not root.iter_values:
        allocated = list(root.block.alloc_buffers)
        root = root.block.body
    transforms = s_tir.transform
    lower = tvm.transform.Sequential(
        [
            transforms.CanonicalizeLoop(),
            transforms.LowerInitBlock(),
            transforms.ConvertBlocksToOpaque(),
            transforms.LowerMatchBuffer(),
            transforms.LowerOpaqueBlock(),
        ]
    )
    name = tvm.ir.GlobalVar("main")
    mod = lower(tvm.IRModule({name: func.with_body(_with_root(root))}))
    body = mod.functions[name].body
    while isinstance(body, s_tir.SBlockRealize):
        allocated += list(body.block.alloc_buffers)
        body = body.block.body
    return body, allocated


def _with_root(body: tirx.Stmt) -> tirx.Stmt:
    return s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))


def _launch(statement: tirx.Stmt, gpu: GpuTarget) -> tuple[tirx.Stmt, list[tirx.Buffer]]:
    """Write a statement as a launch; also the temporaries that must be in global memory."""
    loops: list[tuple[tirx.Var, Expr, Expr]] = []
    body = statement
    while isinstance(body, tirx.For) and _is_counted(body, loops) and is_independent(body) and _all_small(body):
        loops.append((body.loop_var, body.min, plain_extent(body.extent)))
        body = body.body
        while isinstance(body, tirx.SeqStmt) and len(body.seq) == 1:
            body = body.seq[0]
    body, hoisted = _place_temporaries(_serialize(body))
    units: Expr = prod(count if isinstance(count, int) else tirx.Cast("int64", count) for _, _, count in loops)
    threads = threads_for(units, gpu) if loops else WARP
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    number: Expr = block * threads + thread
    exists = number < int64(units)
    values: dict[tirx.Var, Expr] = {}
    for var, start, extent in reversed(loops):
        divisor = int64(max(extent, 1)) if isinstance(extent, int) else T.max(tirx.Cast("int64", extent), int64(1))
        index = tirx.floormod(number, divisor)
        number = tirx.floordiv(number, divisor)
        values[var] = (index if str(var.ty.dtype) == "int64" else tirx.Cast(str(var.ty.dtype), index)) + start
    body = tirx.IfThenElse(exists, replaced(body, values), None)
    blocks = ceil_div(units, threads)
    grid = int64(max(blocks, 1)) if isinstance(blocks, int) else T.max(blocks, int64(1))
    inner = _bound(thread, int64(threads), "threadIdx.x", body)
    return _bound(block, grid, "blockIdx.x", inner), hoisted


def _is_counted(loop: tirx.For, outer: list[tuple[tirx.Var, Expr, Expr]]) -> bool:
    """Return whether a loop's bounds are known at launch: independent of outer loops and of memory."""
    bounds = [loop.min, loop.extent]
    used = {var for bound in bounds for var in variables(bound)}
    return not any(loads(bound) for bound in bounds) and not used & {var for var, _, _ in outer}


def _bound(var: tirx.Var, extent: Expr, tag: str, body: tirx.Stmt) -> tirx.For:
    """Loop bound to blocks or threads."""
    threads = tirx.IterVar(None, tirx.Var("", "int64"), tirx.IterVar.ThreadIndex, tag)
    return tirx.For(var, int64(0), extent, tirx.ForKind.THREAD_BINDING, body, threads)


def _serialize(body: tirx.Stmt) -> tirx.Stmt:
    """Make all loops of a statement serial, and rewrite stored values for CUDA."""

    def serialize(loop: tirx.For) -> tirx.For:
        if loop.kind in (tirx.ForKind.SERIAL, tirx.ForKind.THREAD_BINDING):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body, None, {}, loop.step)

    def store(store: tirx.BufferStore) -> tirx.BufferStore:
        value = for_cuda(store.value)
        return store if value.same_as(store.value) else tirx.BufferStore(store.buffer, value, store.indices)

    return structural_map(body, [(tirx.For, serialize), (tirx.BufferStore, store)])


def _allocations(body: tirx.Stmt) -> list[tirx.AllocBuffer]:
    allocations: list[tirx.AllocBuffer] = []
    structural_walk(body, (tirx.AllocBuffer, allocations.append))
    return allocations


def _bytes(buffer: tirx.Buffer) -> int | None:
    size = max(bytes_of(str(buffer.dtype)), 1)
    for extent in buffer.shape:
        if not isinstance(extent, tirx.IntImm):
            return None
        size *= int(extent)
    return size


def _is_small(buffer: tirx.Buffer) -> bool:
    size = _bytes(buffer)
    return size is not None and size <= _MAX_LOCAL_BYTES


def _all_small(body: tirx.Stmt) -> bool:
    return all(_is_small(a.buffer) for a in _allocations(body) if a.buffer.scope() in ("", "global", "local"))


def _place_temporaries(body: tirx.Stmt) -> tuple[tirx.Stmt, list[tirx.Buffer]]:
    """Place temporaries: small ones in local memory; large ones, of single-threaded statements, in global memory."""
    renamed: dict[tirx.Var, tirx.Buffer] = {}
    hoisted: list[tirx.Buffer] = []
    for allocation in _allocations(body):
        buffer = allocation.buffer
        if buffer.scope() not in ("", "global"):
            continue
        if _is_small(buffer):
            renamed[buffer] = tirx.decl_buffer(list(buffer.shape), str(buffer.dtype), buffer.name, scope="local")
        else:
            hoisted.append(buffer)
    if not renamed and not hoisted:
        return body, []

    def allocate(allocation: tirx.AllocBuffer) -> tirx.Stmt:
        if any(allocation.buffer.same_as(buffer) for buffer in hoisted):
            return tirx.Evaluate(0)
        return allocation

    body = structural_map(body, (tirx.AllocBuffer, allocate))
    if renamed:
        body = structural_map(body, (tvm.ir.Var, lambda var: renamed.get(var, var)))
    return body, hoisted
