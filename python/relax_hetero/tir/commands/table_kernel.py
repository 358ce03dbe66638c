"""GPU kernels that read the addresses of tensors from a table in device memory.

Before::

    def scale_raw(A_data: T.handle("float32"), B_data: T.handle("float32")) -> T.int32:
        A = T.decl_buffer((16,), "float32", data=A_data)
        B = T.decl_buffer((16,), "float32", data=B_data)
        for i in T.thread_binding(16, "threadIdx.x"): ...

After, with the address of the first tensor in the table::

    def scale_table(table: T.handle("int64"), A_entry: T.int32, B_data: T.handle("float32")) -> T.int32:
        B = T.decl_buffer((16,), "float32", data=B_data)
        for i in T.thread_binding(16, "threadIdx.x"):
            A = T.decl_buffer((16,), "float32", data=T.reinterpret(T.handle("float32"), table[A_entry]))
            ...

A CUDA graph keeps the arguments of each launch, so an argument that changes with every submission must be memory that
the kernel reads, inside of the thread-bound loops. A kernel that waits for the launches before it
(`tir.cuda.core.ptx.griddepcontrol_wait`) may read the table before it waits, or afterwards if the launch before writes
the table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm_ffi import structural_map

from ..core.walks import nodes
from ..cuda.core.ptx import is_griddepcontrol_wait, is_launch_dependents

MAX_ENTRIES = 4096  # maximum number of entries of a table; the unchecked extent of its buffer

_TABLE_TYPE = tvm.ir.PointerType(tvm.ir.PrimType("int64"), "global")


def is_one_launch(kernel: tirx.PrimFunc) -> bool:
    """True if a kernel, raw or not, consists of one nest of loops whose outermost loop is bound to GPU threads.

    Only such a kernel can be called by another function: TVM then takes its body for device code.
    """
    return nest_of(kernel) is not None


def waits_before_use(raw: tirx.PrimFunc, entries: Collection[int]) -> bool:
    """True if a raw kernel of one launch waits for the launches before it, and uses these tensors only afterwards.

    The wait, and the statements that let the next launch begin, must stand in one sequence.
    """
    nest = nest_of(raw)
    assert nest is not None, "a kernel of one launch is expected"
    waiting = list(filter(_waits, nodes(nest, tirx.SeqStmt)))
    launches = sum(map(is_launch_dependents, nodes(nest, tirx.Evaluate)))
    if len(waiting) != 1 or launches != sum(map(is_launch_dependents, waiting[0])):
        return False

    def without_rest(sequence: tirx.SeqStmt) -> tirx.Stmt:
        return _in_order(_split_at_wait(sequence)[0]) if sequence.same_as(waiting[0]) else sequence

    return not _in_table(raw, entries).intersection(
        nodes(structural_map(nest, (tirx.SeqStmt, without_rest)), tvm.ir.Var)
    )


def table_kernel(
    raw: tirx.PrimFunc,  # result of `raw_kernel.raw_kernel` for which `is_one_launch` holds
    entries: Collection[int],  # tensor parameters to take from the table
    # Whether it reads the table, and lets the next launch begin, after it has waited for the launches before it;
    # `waits_before_use` must hold.
    after_wait: bool = False,
) -> tirx.PrimFunc:
    """A raw kernel of one launch that takes some of its tensors from a table.

    Returns the kernel whose parameters are the table, then those of `raw` with an int32 entry in place of each such
    tensor.
    """
    table = tirx.Var("table", _TABLE_TYPE)
    return _with_table(raw, entries, table, [], [table], after_wait)


def fetching_kernel(raw: tirx.PrimFunc, entries: Collection[int], fetch: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel like that of `table_kernel` that writes the table first, which saves a launch.

    `raw`, `entries`: see `table_kernel`; `threads_of_one_block` must give a number for `raw`. `fetch`: kernel of one
    block of as many threads, with an extent of the same type, whose second parameter is the table. Returns the kernel
    whose parameters are those of `fetch`, then those of `raw`.
    """
    nest = nest_of(fetch)
    assert nest is not None, "a kernel of one launch is expected"
    before = [nest, tirx.Evaluate(tirx.op.tvm_storage_sync("shared"))]
    return _with_table(raw, entries, fetch.params[1], before, list(fetch.params))


def threads_of_one_block(kernel: tirx.PrimFunc) -> tirx.IntImm | None:
    """The number of threads along x of a kernel of one launch and one block; None if there are more blocks."""
    nest = nest_of(kernel)
    if nest is None:
        return None
    bound = [loop for loop in nodes(nest, tirx.For) if loop.thread_binding is not None]
    extents: dict[str, tirx.IntImm | None] = {
        str(loop.thread_binding.thread_tag): loop.extent if isinstance(loop.extent, tirx.IntImm) else None
        for loop in bound
    }
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
    after_wait: bool = False,
) -> tirx.PrimFunc:
    nest = nest_of(raw)
    assert nest is not None, "a kernel of one launch is expected"
    words = tirx.decl_buffer((tirx.const(MAX_ENTRIES, "int64"),), "int64", "words")
    pointers = [raw.params[i] for i in entries]
    numbers = {p: tirx.Var(f"{p.name.removesuffix('_data')}_entry", tvm.ir.PrimType("int32")) for p in pointers}
    table_reads: list[tirx.Stmt] = [*before, tirx.DeclBuffer(words, data=table)]
    other_declarations: list[tirx.Stmt] = []
    in_table = _in_table(raw, entries)
    outside = {declaration.buffer for declaration in _declared_outside(raw)}

    def on_declaration(declaration: tirx.DeclBuffer) -> tirx.Stmt:
        if declaration.buffer not in outside:
            return declaration
        if after_wait and declaration.buffer not in in_table:
            other_declarations.append(declaration)
            return tirx.Evaluate(0)
        if declaration.data in numbers:
            address = words[tirx.Cast("int64", numbers[declaration.data])]
            declaration = tirx.DeclBuffer(declaration.buffer, data=tirx.reinterpret(declaration.data.ty, address))
        table_reads.append(declaration)  # also views of tensors that are declared there
        return tirx.Evaluate(0)

    def on_sequence(sequence: tirx.SeqStmt) -> tirx.SeqStmt:
        if not _waits(sequence):
            return sequence
        first, rest = _split_at_wait(sequence)
        launch_statements = [statement for statement in first if is_launch_dependents(statement)]
        stays = [statement for statement in first if not is_launch_dependents(statement)]
        return _in_order([*stays, *table_reads, *launch_statements, *rest])

    def on_loop(loop: tirx.For) -> tirx.For:
        if not loop.loop_var.same_as(nest.loop_var):
            return loop
        if after_wait:
            body = _in_order([*other_declarations, structural_map(loop.body, (tirx.SeqStmt, on_sequence))])
        else:
            body = _in_order([*table_reads, loop.body])
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
        )

    body = structural_map(raw.body, (tirx.DeclBuffer, on_declaration))
    body = structural_map(body, (tirx.For, on_loop))
    raw_params = [numbers.get(param, param) for param in raw.params]
    return tirx.PrimFunc([*params, *raw_params], body, raw.ret_type, raw.attrs, raw.span)


def nest_of(kernel: tirx.PrimFunc) -> tirx.For | None:
    """The thread-bound nest of a kernel that does nothing else, or None."""
    work = [statement for statement in _outermost(kernel) if not isinstance(statement, _NO_WORK)]
    if len(work) != 1 or not isinstance(work[0], tirx.For) or work[0].kind != tirx.ForKind.THREAD_BINDING:
        return None
    return work[0]


def _in_table(raw: tirx.PrimFunc, entries: Collection[int]) -> set[Any]:
    """The parameters with an entry in the table, and the buffers that a kernel declares of them before its nest."""
    variables: set[Any] = {raw.params[i] for i in entries}
    for declaration in _declared_outside(raw):
        if not variables.isdisjoint(nodes(declaration.data, tvm.ir.Var)):
            variables.add(declaration.buffer)
    return variables


def _waits(sequence: tirx.SeqStmt) -> bool:
    return any(is_griddepcontrol_wait(statement) for statement in sequence)


def _split_at_wait(sequence: tirx.SeqStmt) -> tuple[list[tirx.Stmt], list[tirx.Stmt]]:
    """The statements up to the wait for the launches before, and the rest."""
    statements = list(sequence)
    end = next((i + 1 for i, statement in enumerate(statements) if is_griddepcontrol_wait(statement)), len(statements))
    return statements[:end], statements[end:]


def _in_order(statements: list[tirx.Stmt]) -> tirx.Stmt:
    """The statements in order; TVM refuses a sequence of one."""
    return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)


_NO_WORK = (tirx.DeclBuffer, tirx.stmt.Return)


def _declared_outside(kernel: tirx.PrimFunc) -> list[tirx.DeclBuffer]:
    """The buffers that a kernel declares before its nest."""
    return [statement for statement in _outermost(kernel) if isinstance(statement, tirx.DeclBuffer)]


def _outermost(kernel: tirx.PrimFunc) -> list[tirx.Stmt]:
    """The statements of a kernel outside of all loops, in order."""
    statements: list[tirx.Stmt] = []
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
            statements.append(statement)
    return statements
