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

from .raw_kernel import in_root_block

MOST_ENTRIES = 4096
"""Of a table; its extent in the code, which nothing checks."""

_TABLE_TYPE = tvm.ir.PointerType(tvm.ir.PrimType("int64"), "global")


def is_one_launch(kernel: tirx.PrimFunc) -> bool:
    """Whether all that a kernel does, raw or not, is one nest of loops of which the outermost is bound to GPU threads.

    Only such a one can be called by another function: TVM then takes its body for code of the device.
    """
    return _split(kernel) is not None


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
    found = _split(raw)
    assert found is not None, "a kernel of one launch is expected"
    declared, nest = found
    table = tirx.Var("table", _TABLE_TYPE)
    pointers = [raw.params[i] for i in entries]
    numbers = {p: tirx.Var(f"{p.name.removesuffix('_data')}_entry", tvm.ir.PrimType("int32")) for p in pointers}
    words = tirx.decl_buffer((tirx.const(MOST_ENTRIES, "int64"),), "int64", "words")
    inside: list[tirx.Stmt] = [tirx.DeclBuffer(words, data=table)]
    outside: list[tirx.Stmt] = []
    for declaration in declared:
        if declaration.data in numbers:
            address = words[tirx.Cast("int64", numbers[declaration.data])]
            pointer = tirx.reinterpret(declaration.data.ty, address)
            inside.append(tirx.DeclBuffer(declaration.buffer, data=pointer))
        else:
            outside.append(declaration)
    body = tirx.SeqStmt([*inside, nest.body])
    loop = tirx.For(
        nest.loop_var, nest.min, nest.extent, nest.kind, body, nest.thread_binding, nest.annotations, nest.step
    )  # fmt: skip
    whole = tirx.SeqStmt([*outside, loop, tirx.stmt.Return(tirx.IntImm("int32", 0))])
    params = [table, *(numbers.get(param, param) for param in raw.params)]
    return tirx.PrimFunc(params, in_root_block(raw.body, lambda _: whole), raw.ret_type, raw.attrs, raw.span)


def _split(kernel: tirx.PrimFunc) -> tuple[list[tirx.DeclBuffer], tirx.For] | None:
    """The declarations and the one thread-bound nest of a kernel; None for one that does anything else."""
    body = kernel.body.block.body if isinstance(kernel.body, s_tir.SBlockRealize) else kernel.body
    statements = list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]
    declared = [statement for statement in statements if isinstance(statement, tirx.DeclBuffer)]
    work = [s for s in statements if not isinstance(s, (tirx.DeclBuffer, tirx.stmt.Return))]
    if len(work) != 1 or not isinstance(work[0], tirx.For) or work[0].kind != tirx.ForKind.THREAD_BINDING:
        return None
    return declared, work[0]
