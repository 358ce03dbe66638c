"""Tied parameters, which let a kernel write a result over an operand, and the in-place form of kernels.

An operand and a result of a kernel are *tied* if they may be the same memory: they have the same element type and
shape, and each element of the operand is read only to compute the same element of the result, just before its store.
Nothing reads it later, no element is computed twice, and the result holds no intermediates before.

Before, with an attribute that ties the first parameter and the last::

    def scale(A: T.Buffer((n, 16), "float32"), B: T.Buffer((n, 16), "float32")):
        T.func_attr({"relax_hetero.tied": [[0, 1]], "tirx.noalias": True})
        for i, j in T.grid(n, 16): B[i, j] = A[i, j] * 2

In place::

    def scale_in_place(A: T.Buffer((n, 16), "float32")):
        for i, j in T.grid(n, 16): A[i, j] = A[i, j] * 2

TVM tells LLVM that accesses through two variables do not alias, unless the attribute ``tirx.noalias`` is false. It is
false for an in-place function, which has several views of one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tvm
from tvm import tirx
from tvm.ir.expr import TensorLoad
from tvm.tirx.buffer import is_buffer_var
from tvm_ffi import structural_equal, structural_map

from ...encoding.problem import Operand
from .walks import nodes, replaced

TIED = "relax_hetero.tied"  # on a PrimFunc: pairs of parameters, an operand and the result that may be the same memory
Tie = tuple[int, int]  # an operand and a result, as numbers of parameters


def with_ties(func: tirx.PrimFunc, ties: Iterable[Tie]) -> tirx.PrimFunc:
    """A kernel with the attribute for the ties whose two parameters have equal types and shapes."""
    pairs = [[operand, result] for operand, result in ties if _same_type(func.params[operand], func.params[result])]
    return func.with_attr(TIED, pairs) if pairs else _without(func, TIED)


def tied_to(func: tirx.PrimFunc, operands: Sequence[Operand], first: int, result: Operand) -> tirx.PrimFunc:
    """A kernel with its last parameter tied to the operands, parameters from `first` on, that equal `result`."""
    last = len(func.params) - 1
    return with_ties(func, [(first + i, last) for i, operand in enumerate(operands) if operand == result])


def ties_of(func: tirx.PrimFunc) -> list[Tie]:
    """The ties in a kernel's attribute."""
    return [(int(operand), int(result)) for operand, result in func.attrs.get(TIED, ())]


def _same_type(operand: tirx.Var, result: tirx.Var) -> bool:
    if not (is_buffer_var(operand) and is_buffer_var(result)):
        return False
    operand_type, result_type = operand.ty, result.ty
    return operand_type.dtype == result_type.dtype and bool(
        structural_equal(list(operand_type.shape), list(result_type.shape))
    )


def in_place(func: tirx.PrimFunc, tie: Tie) -> tirx.PrimFunc:
    """The kernel without the parameter of a tied result, which it writes over the operand.

    Copies of operand elements to the result are removed.
    """
    operand, result = (func.params[number] for number in tie)

    def on_store(store: tirx.BufferStore) -> tirx.Stmt:
        value = store.value
        is_copy_of_source = isinstance(value, TensorLoad) and value.source.same_as(store.buffer)
        return tirx.Evaluate(0) if is_copy_of_source and structural_equal(value.indices, store.indices) else store

    def on_loop(loop: tirx.For) -> tirx.Stmt:
        return loop.body if _is_empty(loop.body) else loop

    with_operand = replaced(func.body, {result: operand})
    without_copies = structural_map(_with_one_view(with_operand, operand), (tirx.BufferStore, on_store))
    body = structural_map(without_copies, (tirx.For, on_loop))
    params = [param for param in func.params if not param.same_as(result)]
    without_body = tirx.PrimFunc(params, tirx.Evaluate(0), func.ret_type, func.attrs, func.span)
    # Inserted afterwards, as in `raw_kernel`: the constructor would search the body for effects.
    kernel = structural_map(without_body, (tirx.Evaluate, lambda _: body))
    return _without(_without(kernel, "global_symbol"), TIED).with_attr("tirx.noalias", False)


def _without(func: tirx.PrimFunc, attribute: str) -> tirx.PrimFunc:
    return func.without_attr(attribute) if attribute in func.attrs else func


def _with_one_view(body: tirx.Stmt, param: tirx.Var) -> tirx.Stmt:
    """`body` with equal views of a parameter replaced by the first of them."""
    views: list[tirx.Var] = []
    original_of: dict[tirx.Var, tirx.Var] = {}

    for view in nodes(body, tirx.DeclBuffer):
        data = view.data
        if isinstance(data, tvm.ir.Call) and data.args and data.args[0].same_as(param):
            original_of[view.buffer] = next((v for v in views if structural_equal(v.ty, view.buffer.ty)), view.buffer)
            views.append(view.buffer)
    duplicates = {view for view, original in original_of.items() if not view.same_as(original)}

    def on_declaration(view: tirx.DeclBuffer) -> tirx.Stmt:
        return tirx.Evaluate(0) if view.buffer in duplicates else view

    without_duplicates = structural_map(body, (tirx.DeclBuffer, on_declaration))
    return replaced(without_duplicates, original_of)


def _is_empty(statement: tirx.Stmt) -> bool:
    if isinstance(statement, tirx.SeqStmt):
        return all(map(_is_empty, statement.seq))
    return isinstance(statement, tirx.Evaluate) and isinstance(statement.value, tirx.IntImm)
