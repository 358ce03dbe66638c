"""Kernels of GPUs that find tensors by their addresses in a table in device memory.

Before::

    def scale_raw(A_data: T.handle("float32"), B_data: T.handle("float32")) -> T.int32:
        A = T.decl_buffer((16,), "float32", data=A_data)
        B = T.decl_buffer((16,), "float32", data=B_data)
        for i in T.thread_binding(16, "threadIdx.x"): ...

After, where the first tensor is found in the table::

    def scale_table(table: T.handle("int64"), A_entry: T.int32, B_data: T.handle("float32")) -> T.int32:
        B = T.decl_buffer((16,), "float32", data=B_data)
        for i in T.thread_binding(16, "threadIdx.x"):
            A = T.decl_buffer((16,), "float32", data=T.reinterpret(T.handle("float32"), table[A_entry]))
            ...

A graph of recorded launches keeps the arguments of each, so an argument that changes with every submission must be
memory that the kernel reads. It is the code inside the thread-bound loops that runs on the device. A kernel that waits
for the launches before it (`tir.cuda.core.ptx.griddepcontrol_wait`) may read the table before it waits, or
behind that where the launch before writes the table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm_ffi import structural_map, structural_walk

from ..cuda.core.ptx import is_griddepcontrol_wait, is_launch_dependents

MAX_ENTRIES = 4096
"""Maximum number of entries of a table; its extent in the code, which nothing checks."""

_TABLE_TYPE = tvm.ir.PointerType(tvm.ir.PrimType("int64"), "global")


def is_one_launch(kernel: tirx.PrimFunc) -> bool:
    """True if all that a kernel does, raw or not, is one nest of loops of which the outermost is bound to GPU threads.

    Only such a one can be called by another function: TVM then takes its body for code of the device.
    """
    return nest_of(kernel) is not None


def waits_before_use(raw: tirx.PrimFunc, entries: Collection[int]) -> bool:
    """True if a raw kernel of one launch waits for the launches before it, and uses these tensors behind that only.

    It has to wait, and to let the next launch begin, in statements of the block that no other ones are around.
    """
    nest = nest_of(raw)
    assert nest is not None, "a kernel of one launch is expected"
    found: list[tirx.SeqStmt] = []

    others: list[tirx.Evaluate] = []

    def on_sequence(sequence: tirx.SeqStmt) -> None:
        found.extend([sequence] * _waits(sequence))

    def on_statement(statement: tirx.Evaluate) -> None:
        others.extend([statement] * is_launch_dependents(statement))

    structural_walk(nest, (tirx.SeqStmt, on_sequence))
    structural_walk(nest, (tirx.Evaluate, on_statement))
    if len(found) != 1 or len(others) != sum(is_launch_dependents(statement) for statement in found[0]):
        return False

    def on_found(sequence: tirx.SeqStmt) -> tirx.Stmt:
        return _in_order(_up_to_wait(sequence)[0]) if sequence.same_as(found[0]) else sequence

    return not _used(structural_map(nest, (tirx.SeqStmt, on_found))) & _in_table(raw, entries)


def table_kernel(raw: tirx.PrimFunc, entries: Collection[int], behind_wait: bool = False) -> tirx.PrimFunc:
    """A raw kernel of one launch that takes some of its tensors from a table.

    Parameters
    ----------
    raw : tirx.PrimFunc
        From `raw_kernel.raw_kernel`, for which `is_one_launch` holds.
    entries : collection of int
        Which of its tensor parameters.
    behind_wait : bool
        Whether it reads the table, and lets the next launch begin, when it has waited for the launches before it;
        `waits_before_use` must hold.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are the table, then the kernel's in order, in which an int32 entry of the table stands for each
        of those tensors.
    """
    table = tirx.Var("table", _TABLE_TYPE)
    return _with_table(raw, entries, table, [], [table], behind_wait)


def fetching_kernel(raw: tirx.PrimFunc, entries: Collection[int], fetch: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel as `table_kernel` makes it that writes the table first: one launch less before it.

    Parameters
    ----------
    raw, entries
        As of `table_kernel`; `threads_of_one_block` gives a number.
    fetch : tirx.PrimFunc
        A kernel of one block of as many threads, counted in the same type, whose second parameter is the table.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those of `fetch`, then the kernel's.
    """
    nest = nest_of(fetch)
    assert nest is not None, "a kernel of one launch is expected"
    before = [nest, tirx.Evaluate(tirx.op.tvm_storage_sync("shared"))]
    return _with_table(raw, entries, fetch.params[1], before, list(fetch.params))


def threads_of_one_block(kernel: tirx.PrimFunc) -> tirx.IntImm | None:
    """The threads along x of a kernel of one launch and one block, as it counts them; None where there are more."""
    nest = nest_of(kernel)
    if nest is None:
        return None
    extents: dict[str, tirx.IntImm | None] = {}

    def on_loop(loop: tirx.For) -> None:
        if loop.thread_binding is not None:
            extents[str(loop.thread_binding.thread_tag)] = loop.extent if isinstance(loop.extent, tirx.IntImm) else None

    structural_walk(nest, (tirx.For, on_loop))
    blocks = [extent for tag, extent in extents.items() if tag.startswith("blockIdx")]
    is_one = str(nest.thread_binding.thread_tag).startswith("blockIdx") and all(
        extent is not None and extent.value == 1 for extent in blocks
    )
    return extents.get("threadIdx.x") if is_one else None


def _with_table(
    raw: tirx.PrimFunc,
    entries: Collection[int],
    table: tirx.Var,
    before: list[tirx.Stmt],
    params: list[tirx.Var],
    behind_wait: bool = False,
) -> tirx.PrimFunc:
    nest = nest_of(raw)
    assert nest is not None, "a kernel of one launch is expected"
    words = tirx.decl_buffer((tirx.const(MAX_ENTRIES, "int64"),), "int64", "words")
    pointers = [raw.params[i] for i in entries]
    numbers = {p: tirx.Var(f"{p.name.removesuffix('_data')}_entry", tvm.ir.PrimType("int32")) for p in pointers}
    inside: list[tirx.Stmt] = [*before, tirx.DeclBuffer(words, data=table)]
    plain: list[tirx.Stmt] = []
    in_table = _in_table(raw, entries)
    outside = {declaration.buffer for declaration in _declared_outside(raw)}

    def on_declaration(declaration: tirx.DeclBuffer) -> tirx.Stmt:
        if declaration.buffer not in outside:
            return declaration
        if behind_wait and declaration.buffer not in in_table:
            plain.append(declaration)
            return tirx.Evaluate(0)
        if declaration.data in numbers:
            address = words[tirx.Cast("int64", numbers[declaration.data])]
            declaration = tirx.DeclBuffer(declaration.buffer, data=tirx.reinterpret(declaration.data.ty, address))
        inside.append(declaration)  # views too, which are of tensors that are declared there
        return tirx.Evaluate(0)

    def on_sequence(sequence: tirx.SeqStmt) -> tirx.SeqStmt:
        if not _waits(sequence):
            return sequence
        first, then = _up_to_wait(sequence)
        moved = [statement for statement in first if is_launch_dependents(statement)]
        kept = [statement for statement in first if not is_launch_dependents(statement)]
        return _in_order([*kept, *inside, *moved, *then])

    def on_loop(loop: tirx.For) -> tirx.For:
        if not loop.loop_var.same_as(nest.loop_var):
            return loop
        if behind_wait:
            body = _in_order([*plain, structural_map(loop.body, (tirx.SeqStmt, on_sequence))])
        else:
            body = _in_order([*inside, loop.body])
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
        )

    body = structural_map(raw.body, (tirx.DeclBuffer, on_declaration))
    body = structural_map(body, (tirx.For, on_loop))
    own = [numbers.get(param, param) for param in raw.params]
    return tirx.PrimFunc([*params, *own], body, raw.ret_type, raw.attrs, raw.span)


def nest_of(kernel: tirx.PrimFunc) -> tirx.For | None:
    """The one thread-bound nest of a kernel; None for one that does anything else."""
    work = [statement for statement in _outermost(kernel) if not isinstance(statement, _NO_WORK)]
    if len(work) != 1 or not isinstance(work[0], tirx.For) or work[0].kind != tirx.ForKind.THREAD_BINDING:
        return None
    return work[0]


def _in_table(raw: tirx.PrimFunc, entries: Collection[int]) -> set[Any]:
    """Parameters that stand in the table, and the buffers that a kernel declares of them before its nest."""
    found: set[Any] = {raw.params[i] for i in entries}
    for declaration in _declared_outside(raw):
        if _used(declaration.data) & found:
            found.add(declaration.buffer)
    return found


def _waits(sequence: tirx.SeqStmt) -> bool:
    return any(is_griddepcontrol_wait(statement) for statement in sequence)


def _up_to_wait(sequence: tirx.SeqStmt) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
    """The statements up to the wait for the launches before, and those behind it."""
    statements = list(sequence)
    end = next((i + 1 for i, statement in enumerate(statements) if is_griddepcontrol_wait(statement)), len(statements))
    return statements[:end], statements[end:]


def _in_order(statements: list[tirx.Stmt]) -> tirx.Stmt:
    """The statements one after the other; TVM has no sequence of a single one."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


def _used(node: tvm.ir.BaseExpr | tirx.Stmt) -> set[Any]:
    """The variables and buffers that occur in it."""
    found: set[Any] = set()
    structural_walk(node, (tvm.ir.Var, found.add))
    return found


_NO_WORK = (tirx.DeclBuffer, tirx.stmt.Return)


def _declared_outside(kernel: tirx.PrimFunc) -> list[tirx.DeclBuffer]:
    """The buffers that a kernel declares before its nest."""
    return [statement for statement in _outermost(kernel) if isinstance(statement, tirx.DeclBuffer)]


def _outermost(kernel: tirx.PrimFunc) -> list[tirx.Stmt]:
    """The statements of a kernel that stand in no loop, in order."""
    found: list[tirx.Stmt] = []
    pending = [kernel.body]
    while pending:
        statement = pending.pop()
        if isinstance(statement, s_tir.SBlockRealize):
            pending.append(statement.block.body)
        elif isinstance(statement, tirx.SeqStmt):
            pending.extend(reversed(list(statement.seq)))
        elif isinstance(statement, tirx.AttrStmt) and statement.attr_key == "device_id":
            pending.append(statement.body)
        else:
            found.append(statement)
    return found
