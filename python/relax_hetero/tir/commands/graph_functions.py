"""Host functions and kernels of a command buffer that runs as a CUDA graph.

The graph is recorded once. A submission writes a row of addresses where the graph's first kernel reads them, and makes
one launch. Both work on words that `artifact.graph_layout` lays out. Sizes in commands become expressions
(`dim_value`), and kernels launch early (`launched_early`).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import tvm
from tvm import tirx
from tvm.script.ir_builder import tirx as T
from tvm_ffi import structural_map

from ...artifact import graph_layout
from ...artifact.graph_layout import CACHED_GRAPHS, FILLED_AT_ONCE, REPORT_INTERVAL, RING_ROWS, Layout
from ...artifact.nccl_layout import NCCL_COLLECTIVE
from ...artifact.signature import Dim
from ...target.gpu_target import MAX_BLOCK_THREADS, gpu_target_of
from ..core.builder import Expr, Function
from ..core.walks import nodes
from ..cuda.core.launch import LATE_WAIT, WAIT
from ..cuda.core.ptx import is_griddepcontrol_wait, is_launch_dependents, launch_dependents, waiting_statements
from .command_list import ADDRESS, ADDRESS_TEXT, Tensor
from .table_kernel import nest_of

_WORD = "int64"
_CALL = "relax_hetero.call_by_address"
_TEXT = ADDRESS_TEXT + (
    f"define linkonce_odr hidden i64 @{_CALL}(i64 %function, i64 %a, i64 %b) alwaysinline {{\n"
    "  %address = inttoptr i64 %function to ptr\n"
    "  %result = call i64 %address(i64 %a, i64 %b)\n  ret i64 %result\n}\n"
)
"""LLVM IR of what TIR cannot express: a call by address, and the address of a tensor as a number.

A callee that returns 32 bits leaves the upper half of the result undefined.
"""


@dataclass(frozen=True)
class Launch:
    """A kernel and its arguments: numbers, or addresses in words of the plan with a byte offset.

    Numbers and offsets may be expressions over the parameters of the command buffer.

    `fetching` is a variant of the kernel that first copies a row of the ring into the table. `nccl` has the arguments
    of `NCCL_COLLECTIVE`, if NCCL's kernels precede the launch.
    """

    kernel: tvm.ir.GlobalVar
    arguments: Sequence[Expr | tuple[int, Expr, tvm.ir.Type]]
    fetching: tvm.ir.GlobalVar | None = None
    nccl: Sequence[int] = ()


def submit_function(
    name: str,
    inputs: Sequence[Tensor],
    results: Sequence[Tensor],
    target: tvm.target.Target,
    parameters: Sequence[tirx.Var] = (),
    numbers: Sequence[tirx.Var] = (),
) -> tirx.PrimFunc:
    """A PrimFunc of inputs, the state, `numbers` and results that submits the graph.

    Its arguments are checked like those of any kernel. Without a graph or a free row it leaves the submission to the
    machine (``relax_hetero.submit_graph``).

    Parameters
    ----------
    parameters : sequence of Var
        Parameters of the command buffer, int64: each is an extent of a tensor, or one of `numbers`.
    """
    layout = Layout(len(inputs) + len(results), len(parameters))
    with Function(name) as function:
        tensors = [function.argument(tensor.name, tensor.shape, tensor.dtype) for tensor in inputs]
        words = function.argument("state", [_word(layout.state_words)], _WORD)
        for number in numbers:
            T.arg(number.name, number)
        tensors += [function.argument(tensor.name, tensor.shape, tensor.dtype) for tensor in results]
        with function.body(), T.attr(tirx.const(0, "int32"), "pragma_import_llvm", _TEXT):
            addresses = [_address(tensor) for tensor in tensors]
            _submit(words, addresses, parameters, layout, target.get_target_device_type())
    # Code that is called by address reads the state, so it may be aliased.
    return _with_target(function, target).with_attr({"tirx.noalias": False})


def _submit(
    words: Any, addresses: Sequence[Expr], parameters: Sequence[Expr], layout: Layout, device_type: int
) -> None:
    ticket = T.bind(words[_word(graph_layout.SUBMITTED)])
    graph = _graph_for(words, parameters, layout) if parameters else T.bind(words[_word(graph_layout.GRAPH)])
    with T.If(tirx.all(graph != 0, ticket - words[_word(graph_layout.CONSUMED)] < RING_ROWS)):
        with T.Then():
            row = T.bind(layout.ring + tirx.truncmod(ticket, _word(RING_ROWS)) * layout.slots)
            for number, address in enumerate(addresses):
                T.buffer_store(words, address, [row + number])
            T.buffer_store(words, ticket + 1, [_word(graph_layout.SUBMITTED)])
            get_stream = words[_word(graph_layout.GET_STREAM)]
            stream = T.bind(_call(get_stream, _word(device_type), words[_word(graph_layout.DEVICE)]))
            code = T.bind(tirx.bitwise_and(_call(words[_word(graph_layout.LAUNCH)], graph, stream), _word(0xFFFFFFFF)))
            with T.If(code != 0), T.Then():
                T.buffer_store(words, ticket, [_word(graph_layout.SUBMITTED)])
                T.evaluate(tirx.call_packed("relax_hetero.graph_failed", _address(words), code))
        with T.Else():
            for number, address in enumerate(addresses):
                T.buffer_store(words, address, [_word(layout.slow_bindings + number)])
            for number, value in enumerate(parameters):
                T.buffer_store(words, value, [_word(layout.slow_parameters + number)])
            T.evaluate(tirx.call_packed("relax_hetero.submit_graph", _address(words)))


def _graph_for(words: Any, parameters: Sequence[Expr], layout: Layout) -> Expr:
    """The graph that was captured for the parameters, or 0."""
    # Without a buffer: a function with a GPU target would allocate it on the GPU.
    graph: Expr = _word(0)
    for index in range(CACHED_GRAPHS):
        entry = layout.graph_cache + index * layout.cache_entry_words
        equal = [tirx.EQ(words[_word(entry + 1 + number)], value) for number, value in enumerate(parameters)]
        is_match = equal[0] if len(equal) == 1 else tirx.all(*equal)
        graph = T.bind(tirx.Select(is_match, words[_word(entry)], graph))
    return graph


def record_function(
    name: str,
    slots: int,
    launches: Sequence[Launch],
    fetch: tvm.ir.GlobalVar | None,
    fill: tvm.ir.GlobalVar,
    target: tvm.target.Target,
    parameters: Sequence[tirx.Var] = (),
) -> tirx.PrimFunc:
    """A PrimFunc of the plan's address and parameters that launches all kernels on the current stream.

    While recording, `fetch` or a fetching launch first copies a row of the ring into the table. If the plan names no
    ring, `fill` writes the plan's bindings there, and the launches are the submission itself.
    """
    with Function(name) as function:
        plan = T.arg("plan", T.handle(_WORD))
        for parameter in parameters:
            T.arg(parameter.name, parameter)
        with function.body():
            words = T.decl_buffer((_word(1),), _WORD, data=plan)

            def address(number: int, offset: Expr = 0, ty: tvm.ir.Type = _POINTER) -> Expr:
                return tirx.reinterpret(ty, words[_word(number)] + offset)

            def launch(kernel: tvm.ir.GlobalVar, *arguments: Expr) -> None:
                T.evaluate(tvm.ir.Call(kernel, list(arguments), ret_ty="int32"))

            is_recording = words[_word(graph_layout.RING)] != 0
            row = [address(word) for word in (graph_layout.RING, graph_layout.TABLE, graph_layout.CONSUMED_ADDRESS)]
            with T.If(is_recording):
                with T.Then():
                    if fetch is None:
                        T.evaluate(0)
                    else:
                        launch(fetch, *row)
                with T.Else():
                    for first in range(0, slots, FILLED_AT_ONCE):
                        entries = range(first, first + FILLED_AT_ONCE)
                        bound = [words[_word(graph_layout.BINDINGS + i)] if i < slots else _word(0) for i in entries]
                        launch(fill, address(graph_layout.TABLE, 8 * (graph_layout.ENTRIES + first)), *bound)
            for item in launches:
                arguments = [address(*a) if isinstance(a, tuple) else a for a in item.arguments]
                if item.nccl:
                    T.evaluate(tirx.call_packed(NCCL_COLLECTIVE, *map(_word, item.nccl)))
                if item.fetching is None:
                    launch(item.kernel, *arguments)
                else:
                    with T.If(is_recording):
                        with T.Then():
                            launch(item.fetching, *row, *arguments[1:])
                        with T.Else():
                            launch(item.kernel, *arguments)
    return _with_target(function, target)


def fetch_kernel(name: str, slots: int, target: tvm.target.Target, extent: tirx.IntImm | None = None) -> tirx.PrimFunc:
    """A kernel that copies the row of the current submission from the ring into the table.

    Reading or writing host memory takes a microsecond. All rows are therefore read at once, while the device's own
    count of submissions selects one; every `REPORT_INTERVAL` submissions the host is sent that count.

    The next launch may begin at once, and waits for this one before it reads the table.

    `extent` is the number of threads of the kernel that this one becomes the beginning of. TVM makes one variable of
    all loops over the same threads, so both have the same type.
    """
    extent = _word(min(RING_ROWS * slots, MAX_BLOCK_THREADS)) if extent is None else extent
    threads = int(extent.value)
    rounds = -(-RING_ROWS * slots // threads)
    with Function(name) as function:
        parameters = [_words_parameter(parameter_name) for parameter_name in ("ring", "table", "consumed")]
        _returns_status()
        with function.body(), T.thread_binding(extent, thread="threadIdx.x") as thread_index:
            thread = tirx.Cast(_WORD, thread_index)
            ring, table, consumed = map(_words_at, parameters)
            if gpu_target_of(target).overlaps_launches:
                launch_dependents()
            ticket = T.alloc_buffer((1,), _WORD, scope="local")
            rows = T.alloc_buffer((rounds,), _WORD, scope="local")
            indices = [_word(iteration * threads) + thread for iteration in range(rounds)]
            for number, index in enumerate(indices):
                with T.If(index < RING_ROWS * slots), T.Then():
                    T.buffer_store(rows, ring[index], [_word(number)])
            T.buffer_store(ticket, table[_word(graph_layout.TICKET)], [_word(0)])
            T.evaluate(T.tvm_storage_sync("shared"))
            with T.If(thread == 0), T.Then():
                T.buffer_store(table, ticket[_word(0)] + 1, [_word(graph_layout.TICKET)])
                with T.If(tirx.truncmod(ticket[_word(0)], _word(REPORT_INTERVAL)) == 0), T.Then():
                    T.buffer_store(consumed, ticket[_word(0)], [_word(0)])
            for number, index in enumerate(indices):
                is_current = tirx.floordiv(index, slots) == tirx.truncmod(ticket[_word(0)], _word(RING_ROWS))
                with T.If(is_current), T.Then():
                    T.buffer_store(table, rows[_word(number)], [graph_layout.ENTRIES + tirx.floormod(index, slots)])
    return _private(function, target)


def fill_kernel(name: str, target: tvm.target.Target) -> tirx.PrimFunc:
    """A kernel that writes its arguments into the table."""
    with Function(name) as function:
        table = _words_parameter("table")
        values = [T.arg(f"entry_{i}", T.int64()) for i in range(FILLED_AT_ONCE)]
        _returns_status()
        with function.body(), T.thread_binding(_word(1), thread="threadIdx.x"):
            entries = _words_at(table)
            for number, value in enumerate(values):
                T.buffer_store(entries, value, [_word(number)])
    return _private(function, target)


_POINTER = tvm.ir.PointerType(tvm.ir.PrimType(_WORD), "global")


def _word(value: int) -> tirx.IntImm:
    return tirx.IntImm(_WORD, value)


def _call(function: Expr, a: Expr, b: Expr) -> Expr:
    return tirx.call_extern(_WORD, _CALL, function, a, b)


def _address(tensor: Any) -> Expr:
    return tirx.call_extern(_WORD, ADDRESS, tensor.data)


def _words_parameter(name: str) -> Any:
    return T.arg(name, T.handle(_WORD))


def _words_at(data: Any) -> Any:
    return T.decl_buffer((_word(1),), _WORD, data=data)


def _returns_status() -> None:
    T.func_ret(tvm.ir.PrimType("int32"))


def _with_target(function: Function, target: tvm.target.Target) -> tirx.PrimFunc:
    return function.result.with_attr("target", target)


def _private(function: Function, target: tvm.target.Target) -> tirx.PrimFunc:
    # Memory may be aliased: values that the host or another kernel wrote must be read again.
    return _with_target(function, target).without_attr("global_symbol").with_attr({"tirx.noalias": False})


# Extents, offsets and numbers of commands: text in plain data becomes expressions.

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: tirx.floordiv,
    ast.Mod: tirx.floormod,
}
_CALLS = {"min": tirx.min, "max": tirx.max}


def dim_value(dim: Dim, parameters: Mapping[str, tirx.Var]) -> Expr:
    """A number, or text in the grammar of `artifact.dims`, as an int64 expression.

    Parameters
    ----------
    parameters : mapping of str to Var
        Variables by the names in the text.
    """
    if isinstance(dim, int):
        return tirx.IntImm("int64", dim)
    return _value(ast.parse(dim, mode="eval").body, parameters)


def _value(node: ast.expr, parameters: Mapping[str, tirx.Var]) -> Expr:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return tirx.IntImm("int64", node.value)
    if isinstance(node, ast.Name):
        return parameters[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, parameters), _value(node.right, parameters))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return tirx.IntImm("int64", 0) - _value(node.operand, parameters)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return reduce(_CALLS[node.func.id], [_value(part, parameters) for part in node.args])
    raise ValueError(f"not a dimension: {ast.dump(node)}")


# Programmatic dependent launch: GPU kernels begin while the launch before them ends.
#
# Before::
#
#     for block in T.thread_binding(16, "blockIdx.x"):
#         for thread in T.thread_binding(64, "threadIdx.x"): ...
#
# After::
#
#     for block in T.thread_binding(16, "blockIdx.x"):
#         griddepcontrol.launch_dependents                 # the next launch may come up to its own wait
#         griddepcontrol.wait                              # until the launch before is complete
#         for thread in T.thread_binding(64, "threadIdx.x"): ...
#
# A kernel whose generator wrote a wait (`tir.cuda.core.launch.enable_pdl`) waits later, after work that depends on no
# other launch, such as prefetching weights. Every kernel of a chain waits: after its wait all launches before it are
# complete, not only the last one. A kernel after one that waits first begins when the launches before that one are
# complete.


def waiting_first(kernel: tirx.PrimFunc, next_waits: bool = False) -> tirx.PrimFunc:
    """A kernel of one launch that waits before anything else, reads of a table of addresses included.

    Parameters
    ----------
    next_waits : bool
        Whether the next launch may begin only when this one has waited.
    """
    nest = nest_of(kernel)
    assert nest is not None, "a kernel of one launch is expected"

    def on_loop(loop: tirx.For) -> tirx.For:
        if not loop.loop_var.same_as(nest.loop_var):
            return loop
        first = waiting_statements() if next_waits else waiting_statements()[::-1]
        body = tirx.SeqStmt([*first, loop.body])
        return tirx.For(
            loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
        )

    return kernel.with_body(structural_map(kernel.body, (tirx.For, on_loop)))


def waiting_late(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel with `LATE_WAIT` that waits there, not at first."""

    def on_sequence(sequence: tirx.SeqStmt) -> tirx.Stmt:
        statements = [s for s in sequence if not (is_griddepcontrol_wait(s) or is_launch_dependents(s))]
        return statements[0] if len(statements) == 1 else tirx.SeqStmt(statements)

    def on_attribute(statement: tirx.AttrStmt) -> tirx.Stmt:
        return tirx.SeqStmt(waiting_statements()) if statement.attr_key == LATE_WAIT else statement

    body = structural_map(kernel.body, (tirx.SeqStmt, on_sequence))
    return kernel.with_body(structural_map(body, (tirx.AttrStmt, on_attribute)))


def waiting_in_place(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """A kernel that waits, and lets the next launch begin, at its statements with `WAIT`."""

    def on_attribute(statement: tirx.AttrStmt) -> tirx.Stmt:
        return tirx.SeqStmt(waiting_statements()[::-1]) if statement.attr_key == WAIT else statement

    return kernel.with_body(structural_map(kernel.body, (tirx.AttrStmt, on_attribute)))


def releases_after_wait(kernel: tirx.PrimFunc) -> bool:
    """Return whether the next launch begins when all before this one are complete, as each block has waited."""
    statements = [s for s in nodes(kernel.body, tirx.Evaluate) if is_griddepcontrol_wait(s) or is_launch_dependents(s)]
    order = list(map(is_launch_dependents, statements))
    return bool(order) and order == [False, True] * (len(order) // 2)


def launched_early(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel, which waits for the launches before it, with an early launch.

    TVM passes the tag on to the driver ("programmatic stream serialization"), and capturing a stream keeps it as an
    edge of the graph. ``tirx.noalias`` is dropped: the CUDA compiler would take memory that the kernel does not write
    for constant, and might read it before the wait.
    """
    tagged = kernel.with_attr("tirx.kernel_launch_params", ["tirx.use_programtic_dependent_launch"])
    return tagged.with_attr("tirx.noalias", False)
