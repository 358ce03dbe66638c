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
memory that the kernel reads. It is the code inside the thread-bound loops that runs on the device.
"""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import s_tir, tirx
from tvm_ffi import structural_map

MOST_ENTRIES = 4096
"""Of a table; its extent in the code, which nothing checks."""

_TABLE_TYPE = tvm.ir.PointerType(tvm.ir.PrimType("int64"), "global")


def is_one_launch(kernel: tirx.PrimFunc) -> bool:
    """Whether all that a kernel does, raw or not, is one nest of loops of which the outermost is bound to GPU threads.

    Only such a one can be called by another function: TVM then takes its body for code of the device.
    """
    return _nest(kernel) is not None


def table_kernel(raw: tirx.PrimFunc, entries: Collection[int]) -> tirx.PrimFunc:
    """A raw kernel of one launch that takes some of its tensors from a table.

    Parameters
    ----------
    raw : tirx.PrimFunc
        From `raw_kernel.raw_kernel`, for which `is_one_launch` holds.
    entries : collection of int
        Which of its tensor parameters.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are the table, then the kernel's in order, in which an int32 entry of the table stands for each
        of those tensors.
    """
    nest = _nest(raw)
    assert nest is not None, "a kernel of one launch is expected"
    table = tirx.Var("table", _TABLE_TYPE)
    words = tirx.decl_buffer((tirx.const(MOST_ENTRIES, "int64"),), "int64", "words")
    pointers = [raw.params[i] for i in entries]
    numbers = {p: tirx.Var(f"{p.name.removesuffix('_data')}_entry", tvm.ir.PrimType("int32")) for p in pointers}
    inside: list[tirx.Stmt] = [tirx.DeclBuffer(words, data=table)]

    def on_declaration(declaration: tirx.DeclBuffer) -> tirx.Stmt:
        if declaration.data not in numbers:
            return declaration
        address = words[tirx.Cast("int64", numbers[declaration.data])]
        inside.append(tirx.DeclBuffer(declaration.buffer, data=tirx.reinterpret(declaration.data.ty, address)))
        return tirx.Evaluate(0)

    def on_loop(loop: tirx.For) -> tirx.For:
        if not loop.loop_var.same_as(nest.loop_var):
            return loop
        body = tirx.SeqStmt([*inside, loop.body])
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
        )

    body = structural_map(raw.body, (tirx.DeclBuffer, on_declaration))
    body = structural_map(body, (tirx.For, on_loop))
    params = [table, *(numbers.get(param, param) for param in raw.params)]
    return tirx.PrimFunc(params, body, raw.ret_type, raw.attrs, raw.span)


def _nest(kernel: tirx.PrimFunc) -> tirx.For | None:
    """The one thread-bound nest of a kernel; None for one that does anything else."""
    work: list[tirx.Stmt] = []
    pending = [kernel.body]
    while pending:
        statement = pending.pop()
        if isinstance(statement, s_tir.SBlockRealize):
            pending.append(statement.block.body)
        elif isinstance(statement, tirx.SeqStmt):
            pending.extend(statement.seq)
        elif isinstance(statement, tirx.AttrStmt) and statement.attr_key == "device_id":
            pending.append(statement.body)
        elif not isinstance(statement, (tirx.DeclBuffer, tirx.stmt.Return)):
            work.append(statement)
    if len(work) != 1 or not isinstance(work[0], tirx.For) or work[0].kind != tirx.ForKind.THREAD_BINDING:
        return None
    return work[0]
