"""Kernels of a module's encoded ops: requested from resolvers, checked, named and shared.

A kernel is named after its problem and device, such as ``matmul_128x768x3072_llvm_0``: one name per distinct problem
and target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.tirx.buffer import is_buffer_var

from ...encoding.activations import named
from ...encoding.encoding import Encoding
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import (
    APPEND,
    AttentionProblem,
    BlockUnpackProblem,
    CachedAttentionProblem,
    ConvProblem,
    Dim,
    MatmulProblem,
    Operand,
    Problem,
)
from ...encoding.resolver import resolver_or_default
from ...encoding.row_program import RowProgram
from ...errors import EncodingError
from ...op.encoded import PRODUCTS, encoded_op
from ...target.cpu_target import cpu_target_of
from ...target.element_types import short_name
from ...target.gpu_target import gpu_target_of
from ...target.vdevice import device_identifier
from ..ir.callee_devices import target_of
from ..ir.extents import Symbols
from ..ir.kernels import OPS, work_attributes
from ..ir.rewriting import fresh_global_var, relax_functions, walk_bindings
from .encoded_values import Stored, StoredRows
from .kernel_problems import (
    attention_problem,
    block_rows_problem,
    cached_attention_problem,
    elementwise_problem,
    product_problem,
    quantized_matmul_problem,
    rows_problem,
)


class VariantNames:
    """Names of the kernel variants of one module, by problem and target."""

    def __init__(self, mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> None:
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()} | _variant_names(mod)
        self._names: dict[tuple[MatmulProblem | ConvProblem, str], str] = {}
        self._devices: dict[str, str] = {}
        for vdevice in vdevices:
            self._devices.setdefault(str(vdevice.target), device_identifier(vdevice, vdevices))

    def name(self, problem: MatmulProblem | ConvProblem, target: tvm.target.Target) -> str:
        """The name of the variant that solves `problem` on `target`; equal problems share it."""
        key = (problem, str(target))
        if key not in self._names:
            self._names[key] = self._fresh(f"{_describe(problem)}_{self.device(target)}")
        return self._names[key]

    def device(self, target: tvm.target.Target) -> str:
        """The first device of a target, as an identifier."""
        return self._devices.get(str(target), str(target.kind.name))

    def _fresh(self, base: str) -> str:
        name, count = base, 0
        while name in self._used_names:
            count += 1
            name = f"{base}_v{count}"
        self._used_names.add(name)
        return name


def _describe(problem: MatmulProblem | ConvProblem) -> str:
    return _describe_convolution(problem) if isinstance(problem, ConvProblem) else _describe_product(problem)


def _describe_convolution(problem: ConvProblem) -> str:
    """Name such as ``conv2d_1x64x56x56_128x3x3_s2``: data, output channels and window, then non-default attributes."""
    data, weight, windows = problem.data, problem.weight, problem.windows
    parts = [f"conv{len(windows)}d", shape_text(data.shape), shape_text([weight.shape[0], *weight.shape[2:]])]
    for letter, values in (("s", [w.stride for w in windows]), ("d", [w.dilation for w in windows])):
        if any(value != 1 for value in values):
            parts.append(letter + shape_text(values if len(set(values)) > 1 else values[:1]))
    if problem.groups != 1:
        parts.append(f"g{problem.groups}")
    return "_".join(parts) + _types_text(data.dtype, weight.dtype)


def _describe_product(problem: MatmulProblem) -> str:
    lhs, rhs = problem.lhs, problem.rhs
    batch = [n for n in dict.fromkeys((*lhs.index_map, *rhs.index_map)) if n.startswith("b")]
    sizes = [lhs.size(n) if n in lhs.index_map else rhs.size(n) for n in batch]
    sizes += [lhs.size("m"), rhs.size("n"), lhs.size("k")]
    op = "batch_matmul" if batch else "matmul"
    return f"{op}_{shape_text(sizes)}{_types_text(lhs.dtype, rhs.dtype)}"


def _types_text(lhs: str, rhs: str) -> str:
    return "" if {lhs, rhs} == {"float32"} else f"_{short_name(lhs)}{short_name(rhs)}"


def shape_text(sizes: Sequence[Dim]) -> str:
    """Sizes as text, ``128x768``; D stands for a symbolic extent."""
    return "x".join("D" if isinstance(size, str) else str(size) for size in sizes)


def _variant_names(mod: tvm.IRModule) -> set[str]:
    values = [binding.value for _, func in relax_functions(mod) for binding in walk_bindings(func)]
    return {str(call.attrs.kernel) for call in values if encoded_op(call) in PRODUCTS} - {""}


_OPAQUE_PATTERN = 8  # TVM's kOpaque: stock fusion does not fuse such a kernel
_MAX_NAMED_OPS = 3
"""Maximum number of ops of an epilogue in a kernel's name."""


@dataclass
class KernelTable:
    """PrimFuncs of one module: one per distinct key and target, written on first request."""

    used_names: set[str]
    functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = field(default_factory=dict)
    _kernels: dict[tuple[Any, str], tvm.ir.GlobalVar] = field(default_factory=dict)

    def get(
        self,
        key: Any,
        target: tvm.target.Target,
        name: str,
        ops: Sequence[str],
        make: Callable[[], tirx.PrimFunc],
    ) -> tvm.ir.GlobalVar:
        """The kernel that solves `key` on `target`; `make` writes it once.

        Parameters
        ----------
        key : hashable
            Complete description of the computation.
        target : tvm.target.Target
        name : str
            Name of a new kernel; a number is appended if it is used already.
        ops : sequence of str
            Ops that the kernel computes, for profiles.
        make : Callable
            Function that writes the PrimFunc.
        """
        full_key = (key, str(target))
        if full_key not in self._kernels:
            func = make().with_attr(
                {"target": target, "op_pattern": _OPAQUE_PATTERN, OPS: list(ops), **work_attributes(key)}
            )
            if "global_symbol" in func.attrs:
                func = func.without_attr("global_symbol")
            gvar = fresh_global_var(name, func.ty, self.used_names)
            self.functions[gvar] = func
            self._kernels[full_key] = gvar
        return self._kernels[full_key]


class EncodingKernels:
    """Kernels of a module: one PrimFunc for each distinct problem and target.

    Parameters
    ----------
    mod : tvm.IRModule
    vdevices : sequence of relax.VDevice
        Devices of the module.
    """

    def __init__(self, mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> None:
        self._names = VariantNames(mod, vdevices)
        self._table = KernelTable({gv.name_hint for gv in mod.get_global_vars()})

    @property
    def functions(self) -> dict[tvm.ir.GlobalVar, tirx.PrimFunc]:
        """The kernels written so far."""
        return self._table.functions

    def product(
        self,
        encoding: Encoding,
        operands: Sequence[Stored],
        result: Stored,
        expression: Expression | None,
        epilogue_operands: Sequence[Stored],
        name: str,
        op_text: str,
        rows: StoredRows | None = None,
        row_ops: Sequence[str] = (),
    ) -> tvm.ir.GlobalVar:
        """The kernel of a product or convolution (and perhaps an initial accumulator), its epilogue and row phase.

        `row_ops` are the names of the ops of the row phase; `op_text` names the op in errors, here and below.
        """
        target = target_of(result.ty.vdevice)
        expression = expression and _named(expression, result)
        problem = product_problem(encoding, operands, result, expression, epilogue_operands, rows)
        epilogue = [*_op_names(expression), *row_ops]
        full_name = "_".join([name or self._names.name(problem, target), *epilogue[:_MAX_NAMED_OPS]])
        return self._solve(problem, target, full_name, [encoding.op_type, *epilogue], op_text)

    def elementwise(
        self, expression: Expression, operands: Sequence[Stored], result: Stored, op_text: str
    ) -> tvm.ir.GlobalVar:
        """The kernel of an elementwise op that is not fused into a product."""
        target = target_of(result.ty.vdevice)
        expression = _named(expression, result)
        problem = elementwise_problem(expression, operands, result)
        op_names = _op_names(expression)
        name = "_".join([*op_names[: _MAX_NAMED_OPS + 1], shape_text(problem.result.shape), self._names.device(target)])
        return self._solve(problem, target, name, op_names, op_text)

    def rows(
        self, program: RowProgram, operands: Sequence[Stored], result: Stored, ops: str, op_text: str
    ) -> tvm.ir.GlobalVar:
        """The kernel of a row program; `ops` are the names of the ops that it replaces, separated by commas."""
        target = target_of(result.ty.vdevice)
        problem = rows_problem(program, operands, result)
        names = [name for name in ops.split(",") if name] or ["rows"]
        shape = next((operand.shape for operand in problem.operands if "n" in operand.index_map), problem.result.shape)
        name = "_".join([*names[: _MAX_NAMED_OPS + 1], shape_text(shape), self._names.device(target)])
        return self._solve(problem, target, name, names, op_text)

    def attention(
        self, call: relax.Call, result: relax.TensorType, op_text: str
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType | None]:
        """The kernel of an attention, and the type of its last parameter if that is scratch."""
        target = target_of(result.vdevice)
        problem = attention_problem(call, result)
        sizes = dict(problem.sizes)
        name = f"attention_{shape_text([sizes[dim] for dim in 'bhmnd'])}_{self._names.device(target)}"
        ops = ["matmul", *_op_names(problem.scores.expression), "softmax", "matmul"]
        return self._with_scratch(problem, target, name, ops, op_text, result.vdevice)

    def cached_attention(
        self, call: relax.Call, out: relax.TensorType, op_text: str
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType | None]:
        """The kernel of an attention with a cache, and the type of its scratch, as in `attention`."""
        target = target_of(out.vdevice)
        problem = cached_attention_problem(call, out, resolver_or_default(target).page_order(target))
        rows, heads = problem.out.shape[0], [problem.heads, problem.kv_heads, problem.size]
        name = f"{problem.rows}_attention_{shape_text([rows, *heads])}_{self._names.device(target)}"
        ops = ["rms_norm"] * bool(problem.norms) + ["rotary"] * bool(problem.rotary)
        ops += ["append", "matmul", "softmax", "matmul"]
        return self._with_scratch(problem, target, name, ops, op_text, out.vdevice)

    def append(self, call: relax.Call, out: relax.TensorType, op_text: str) -> tvm.ir.GlobalVar | None:
        """The kernel that writes keys and values of a chunk into their pages; None if `cached_attention` does it."""
        target = target_of(out.vdevice)
        if str(call.attrs.rows) != "chunk" or not resolver_or_default(target).appends_in_own_kernel:
            return None
        problem = replace(
            cached_attention_problem(call, out, resolver_or_default(target).page_order(target)), rows=APPEND
        )
        sizes = [problem.out.shape[0], problem.kv_heads, problem.size]
        ops = ["rms_norm"] * ("k" in problem.norms) + ["rotary"] * bool(problem.rotary) + ["append"]
        return self._solve(problem, target, f"append_{shape_text(sizes)}_{self._names.device(target)}", ops, op_text)

    def _with_scratch(
        self,
        problem: AttentionProblem | CachedAttentionProblem,
        target: tvm.target.Target,
        name: str,
        ops: Sequence[str],
        op_text: str,
        vdevice: relax.VDevice,
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType | None]:
        kernel = self._solve(problem, target, name, ops, op_text)
        params = self.functions[kernel].params
        if len(params) == len(problem.parameters):
            return kernel, None
        scratch = params[-1]
        return kernel, relax.TensorType(list(scratch.shape), str(scratch.dtype), vdevice)

    def quantized_matmul(self, call: relax.Call, result: relax.TensorType, op_text: str) -> tvm.ir.GlobalVar:
        """The kernel of a product with block-quantized weights."""
        target = target_of(result.vdevice)
        problem = quantized_matmul_problem(call, result)
        epilogue = _op_names(problem.epilogue.expression if problem.epilogue else None)
        sizes = [*problem.result.shape, problem.depth]
        name = "_".join(["block_matmul", shape_text(sizes), self._names.device(target), *epilogue[:_MAX_NAMED_OPS]])
        return self._solve(problem, target, name, ["block_matmul", *epilogue], op_text)

    def unpacked_matmul(
        self, call: relax.Call, result: relax.TensorType, op_text: str
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType, tvm.ir.GlobalVar, int] | None:
        """Kernel that dequantizes the weights of a product of many rows, its result; the product; the weights' count.

        None if the target multiplies that many rows by the quantized weights.
        """
        target = target_of(result.vdevice)
        problem = quantized_matmul_problem(call, result)
        layout = resolver_or_default(target).unpacked_layout(problem, target)
        if layout is None:
            return None
        numbers = Operand((problem.depth, problem.columns), problem.lhs.dtype, ("k", "n"), layout)
        sizes, device = [problem.columns, problem.depth], self._names.device(target)
        # One kernel for a weight, independent of the other operand.
        plain = replace(problem, lhs=_one_row(problem.lhs), result=_one_row(problem.result), epilogue=None)
        name = f"block_unpack_{shape_text(sizes)}_{device}"
        unpack = self._solve(BlockUnpackProblem(plain, numbers), target, name, ["block_unpack"], op_text)
        product = MatmulProblem(problem.lhs, numbers, problem.result, "float32", epilogue=problem.epilogue)
        epilogue = _op_names(problem.epilogue.expression if problem.epilogue else None)
        name = "_".join(
            ["matmul", shape_text([*problem.result.shape, problem.depth]), device, *epilogue[:_MAX_NAMED_OPS]]
        )
        multiply = self._solve(product, target, name, ["block_matmul", *epilogue], op_text)
        shape = [int(extent) for extent in layout.packed_shape([problem.depth, problem.columns])]
        ty = relax.TensorType(shape, problem.lhs.dtype, result.vdevice)
        return unpack, ty, multiply, len(problem.weights)

    def block_rows(self, call: relax.Call, result: relax.TensorType, op_text: str) -> tvm.ir.GlobalVar:
        """The kernel that dequantizes rows of block-quantized weights."""
        target = target_of(result.vdevice)
        problem = block_rows_problem(call, result)
        name = f"block_rows_{shape_text(problem.result.shape)}_{self._names.device(target)}"
        return self._solve(problem, target, name, ["block_rows"], op_text)

    def relayout(self, source: Stored, result: Stored, op_text: str) -> tvm.ir.GlobalVar:
        """The kernel that packs, unpacks (one of the layouts is row-major) or relayouts a tensor."""
        target = target_of(result.ty.vdevice)
        symbols = Symbols()
        shape = tuple(symbols.dim(extent) for extent in result.ty.shape.values)
        dtype = str(result.ty.dtype)
        layouts = source.layout, result.layout
        op = "pack" if layouts[0].is_identity else "unpack" if layouts[1].is_identity else "relayout"
        names = tuple(f"d{i}" for i in range(len(shape)))
        buffers = [Operand(shape, dtype, names, stored.layout) for stored in (source, result)]
        name = f"{op}_{shape_text(shape)}_{self._names.device(target)}"
        key = (op, shape, dtype, *layouts)

        def make() -> tirx.PrimFunc:
            return _checked(_relayout_kernel(shape, dtype, *layouts, target), buffers, target, op_text)

        return self._table.get(key, target, name, [op], make)

    def _solve(
        self,
        problem: Problem,
        target: tvm.target.Target,
        name: str,
        ops: Sequence[str],
        op_text: str,
    ) -> tvm.ir.GlobalVar:
        def make() -> tirx.PrimFunc:
            resolver = resolver_or_default(target)
            try:
                func = resolver.kernel(problem, target)
            except EncodingError as error:
                raise EncodingError(f"{op_text}, on target {target}: {error}") from error
            except Exception as error:  # a third party's code raises any error, without naming the op
                raise EncodingError(
                    f"{op_text}: resolver {resolver.name!r} wrote no kernel for target {target}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            may_have_scratch = isinstance(problem, (AttentionProblem, CachedAttentionProblem))
            return _checked(
                func, problem.parameters, target, f"{op_text}, resolver {resolver.name!r}", may_have_scratch
            )

        return self._table.get(problem, target, name, ops, make)


def _relayout_kernel(
    shape: tuple[Dim, ...], dtype: str, source: PackedLayout, result: PackedLayout, target: tvm.target.Target
) -> tirx.PrimFunc:
    """The kernel that changes a tensor's layout; generators are imported when they are needed."""
    if "gpu" in target.keys:
        from ...tir.cuda.pack import relayout_kernel

        return relayout_kernel(shape, dtype, source, result, gpu_target_of(target))
    from ...tir.pack import pack

    cpu = cpu_target_of(target)
    if source.is_identity:
        return pack.pack_kernel(shape, dtype, result, cpu)
    if result.is_identity:
        return pack.unpack_kernel(shape, dtype, source, cpu)
    return pack.relayout_kernel(shape, dtype, source, result, cpu)


def _one_row(operand: Operand) -> Operand:
    """The operand with one row instead of many."""
    return replace(operand, shape=(1, operand.shape[-1]), index_map=("m", operand.index_map[-1]), layout=_ROW_MAJOR)


_ROW_MAJOR = PackedLayout.identity(2)


def _named(expression: Expression, result: Stored) -> Expression:
    """The expression with its activations by name, which only exist up to single precision."""
    return expression if str(result.ty.dtype) == "float64" else named(expression)


def _op_names(expression: Expression | None) -> list[str]:
    """The ops of an expression, each once, in order."""
    if expression is None:
        return []
    return list(dict.fromkeys(term.op for term in expression.terms() if term.op not in ("operand", "number")))


def _checked(
    func: Any, buffers: Sequence[Operand], target: tvm.target.Target, op_text: str, may_have_scratch: bool = False
) -> tirx.PrimFunc:
    """Check that a kernel takes the buffers of its problem, and perhaps one of scratch, whose shape is its own.

    Any other kernel would misinterpret memory.
    """
    prefix = f"{op_text}, on target {target}: found"
    if not isinstance(func, tirx.PrimFunc):
        raise EncodingError(f"{prefix} {type(func).__name__}, expected a PrimFunc")
    num_scratch = len(func.params) - len(buffers)
    if num_scratch not in (0, int(may_have_scratch)) or not all(map(is_buffer_var, func.params)):
        count = f"{len(buffers)} buffers{' and perhaps one of scratch' if may_have_scratch else ''}"
        raise EncodingError(f"{prefix} a kernel of parameters {list(func.params)}, expected {count}")
    for index, (buffer, operand) in enumerate(zip(func.params, buffers, strict=False)):
        _check_buffer(buffer, operand, f"{prefix} parameter {index}")
    return func


def _check_buffer(buffer: tirx.Buffer, operand: Operand, prefix: str) -> None:
    if str(buffer.dtype) != operand.dtype:
        raise EncodingError(f"{prefix} of type {buffer.dtype}, expected {operand.dtype}")
    expected = _stored_extents(operand)
    extents = [int(extent) if isinstance(extent, tirx.IntImm) else None for extent in buffer.shape]
    if len(extents) != len(expected) or any(
        a is not None and b is not None and a != b for a, b in zip(extents, expected, strict=True)
    ):
        raise EncodingError(f"{prefix} of shape {list(buffer.shape)}, expected {expected} (None: symbolic)")


def _stored_extents(operand: Operand) -> list[int | None]:
    """The extents of an operand's buffer, None for a symbolic one."""
    shape = [tirx.Var(extent, "int64") if isinstance(extent, str) else extent for extent in operand.shape]
    return [extent if isinstance(extent, int) else None for extent in operand.layout.packed_shape(shape)]
