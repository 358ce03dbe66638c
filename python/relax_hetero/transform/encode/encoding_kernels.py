"""Kernels of a module's encoded ops: requested from resolvers, checked, named and shared.

A kernel is named after its problem and device, such as ``matmul_128x768x3072_llvm_0``: one name per distinct problem
and target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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
    EXPERT_SUM,
    AttentionProblem,
    BlockUnpackProblem,
    CachedAttentionProblem,
    ConvProblem,
    Dim,
    MatmulProblem,
    Operand,
    Problem,
    QuantizedMatmulProblem,
    SentSum,
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
from ..ir.kernels import OPS, opaque_kernel, work_attributes
from ..ir.rewriting import fresh_global_var, relax_functions, walk_bindings
from .encoded_values import Stored, StoredRows
from .kernel_problems import (
    attention_problem,
    block_rows_problem,
    cached_attention_problem,
    elementwise_problem,
    panel_fragments_problem,
    product_problem,
    rows_problem,
)


class VariantNames:
    """Unique kernel names of one module, by problem and target."""

    def __init__(self, mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> None:
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()} | _variant_names(mod)
        self._names: dict[tuple[MatmulProblem | ConvProblem, str], str] = {}
        self._devices: dict[str, str] = {}
        for vdevice in vdevices:
            self._devices.setdefault(str(vdevice.target), device_identifier(vdevice, vdevices))

    def name(self, problem: MatmulProblem | ConvProblem, target: tvm.target.Target) -> str:
        """The name of the kernel that solves `problem` on `target`; equal problems share it."""
        key = (problem, str(target))
        if key not in self._names:
            self._names[key] = self._unused_name(f"{_base_name(problem)}_{self.device(target)}")
        return self._names[key]

    def device(self, target: tvm.target.Target) -> str:
        """The first device with a target, as part of an identifier."""
        return self._devices.get(str(target), str(target.kind.name))

    def _unused_name(self, base: str) -> str:
        name, count = base, 0
        while name in self._used_names:
            count += 1
            name = f"{base}_v{count}"
        self._used_names.add(name)
        return name


def _base_name(problem: MatmulProblem | ConvProblem) -> str:
    return _convolution_name(problem) if isinstance(problem, ConvProblem) else _product_name(problem)


def _convolution_name(problem: ConvProblem) -> str:
    """Name such as ``conv2d_1x64x56x56_128x3x3_s2``: data, output channels and window, then non-default attributes."""
    data, weight, windows = problem.data, problem.weight, problem.windows
    parts = [f"conv{len(windows)}d", shape_text(data.shape), shape_text([weight.shape[0], *weight.shape[2:]])]
    for letter, values in (("s", [w.stride for w in windows]), ("d", [w.dilation for w in windows])):
        if any(value != 1 for value in values):
            parts.append(letter + shape_text(values if len(set(values)) > 1 else values[:1]))
    if problem.groups != 1:
        parts.append(f"g{problem.groups}")
    return "_".join(parts) + _types_suffix(data.dtype, weight.dtype)


def _product_name(problem: MatmulProblem) -> str:
    lhs, rhs = problem.lhs, problem.rhs
    batch = [dim for dim in dict.fromkeys((*lhs.index_map, *rhs.index_map)) if dim.startswith("b")]
    sizes = [lhs.size(dim) if dim in lhs.index_map else rhs.size(dim) for dim in batch]
    sizes += [lhs.size("m"), rhs.size("n"), lhs.size("k")]
    op = ("batch_matmul" if batch else "matmul") + ("_pair" if problem.second else "")
    return f"{op}_{shape_text(sizes)}{_types_suffix(lhs.dtype, rhs.dtype)}"


def _types_suffix(lhs: str, rhs: str) -> str:
    return "" if {lhs, rhs} == {"float32"} else f"_{short_name(lhs)}{short_name(rhs)}"


def shape_text(sizes: Sequence[Dim]) -> str:
    """Sizes as text, ``128x768``; D stands for a symbolic extent."""
    return "x".join("D" if isinstance(size, str) else str(size) for size in sizes)


def _variant_names(mod: tvm.IRModule) -> set[str]:
    values = [binding.value for _, func in relax_functions(mod) for binding in walk_bindings(func)]
    return {str(call.attrs.kernel) for call in values if encoded_op(call) in PRODUCTS} - {""}


_MAX_NAMED_OPS = 3
"""Maximum number of ops in a kernel's name besides its first op, such as those of an epilogue."""


class EncodingKernels:
    """Kernels of a module's encoded ops, which resolvers write: one for each distinct problem and target.

    Parameters
    ----------
    vdevices : sequence of relax.VDevice
        Devices of the module.
    """

    def __init__(self, mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> None:
        self.functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}  # the kernels written so far
        self._names = VariantNames(mod, vdevices)
        self._used_names = {gv.name_hint for gv in mod.get_global_vars()}
        self._kernels: dict[tuple[Any, str], tvm.ir.GlobalVar] = {}  # by problem and target
        self._problems: dict[tvm.ir.GlobalVar, Any] = {}

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
        """The kernel of a product or convolution with its epilogue and row phase.

        `operands` may include an initial accumulator. `row_ops` are the ops of the row phase, for names and profiles.
        `op_text` names the op in errors, here and below.
        """
        target = target_of(result.ty.vdevice)
        expression = expression and _with_named_functions(expression, result)
        problem = product_problem(encoding, operands, result, expression, epilogue_operands, rows)
        epilogue = [*_op_names(expression), *row_ops]
        full_name = "_".join([name or self._names.name(problem, target), *epilogue[:_MAX_NAMED_OPS]])
        return self._kernel(problem, target, full_name, [encoding.op_type, *epilogue], op_text)

    def sending(self, kernel: tvm.ir.GlobalVar, sent: SentSum) -> tuple[tvm.ir.GlobalVar, int] | None:
        """The kernel of the same product that sends its result, and the index of its parameter of addresses.

        None if there is none, or sending saves no time.
        """
        problem = self._problems.get(kernel)
        if not isinstance(problem, (MatmulProblem, QuantizedMatmulProblem)):
            return None
        func = self.functions[kernel]
        target = func.attrs["target"]
        if not resolver_or_default(target).sends_sum(problem, target):
            return None
        name, ops = f"{kernel.name_hint}_sent", [str(op) for op in func.attrs[OPS]]
        sender = replace(problem, sent=sent)
        return self._kernel(sender, target, name, ops, name), sender.parameters.index(sent.addresses)

    def product_of(self, kernel: tvm.ir.GlobalVar) -> MatmulProblem | None:
        """The problem of a product's kernel; None for any other kernel."""
        problem = self._problems.get(kernel)
        return problem if isinstance(problem, MatmulProblem) else None

    def pair(self, kernel: tvm.ir.GlobalVar, problem: MatmulProblem) -> tvm.ir.GlobalVar | None:
        """The kernel of the product of `kernel` and a second one of the same rows; None if its device has none."""
        target = self.functions[kernel].attrs["target"]
        if not resolver_or_default(target).multiplies_pairs(replace(problem, second=None), target):
            return None
        ops = _op_names(problem.epilogue.expression if problem.epilogue else None)
        name = "_".join([self._names.name(problem, target), *ops[:_MAX_NAMED_OPS]])
        return self._kernel(problem, target, name, ["matmul", "matmul", *ops], name)

    def add(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        """Add a kernel of another pass, once for each name."""
        if (name, "") not in self._kernels:
            self._kernels[name, ""] = self._added(kernel, name)
        return self._kernels[name, ""]

    def elementwise(
        self, expression: Expression, operands: Sequence[Stored], result: Stored, op_text: str
    ) -> tvm.ir.GlobalVar:
        """The kernel of an elementwise op that is not fused into a product."""
        target = target_of(result.ty.vdevice)
        expression = _with_named_functions(expression, result)
        problem = elementwise_problem(expression, operands, result)
        op_names = _op_names(expression)
        name = "_".join([*op_names[: _MAX_NAMED_OPS + 1], shape_text(problem.result.shape), self._names.device(target)])
        return self._kernel(problem, target, name, op_names, op_text)

    def rows(
        self, program: RowProgram, operands: Sequence[Stored], result: Stored, ops: str, op_text: str
    ) -> tvm.ir.GlobalVar:
        """The kernel of a row program; `ops` are the names of the ops that it replaces, separated by commas."""
        target = target_of(result.ty.vdevice)
        problem = rows_problem(program, operands, result)
        names = [name for name in ops.split(",") if name] or ["rows"]
        shape = next((operand.shape for operand in problem.operands if "n" in operand.index_map), problem.result.shape)
        name = "_".join([*names[: _MAX_NAMED_OPS + 1], shape_text(shape), self._names.device(target)])
        return self._kernel(problem, target, name, names, op_text)

    def attention(
        self, call: relax.Call, result: relax.TensorType, op_text: str
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType | None]:
        """The kernel of an attention, and the type of its last parameter if that is scratch."""
        target = target_of(result.vdevice)
        problem = attention_problem(call, result)
        sizes = dict(problem.sizes)
        name = f"attention_{shape_text([sizes[dim] for dim in 'bhmnd'])}_{self._names.device(target)}"
        ops = ["matmul", *_op_names(problem.scores.expression), "softmax", "matmul"]
        return self._kernel_and_scratch(problem, target, name, ops, op_text, result.vdevice)

    def cached_attention(
        self, call: relax.Call, out: relax.TensorType, op_text: str
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType | None]:
        """The kernel of an attention with a cache, and the type of its scratch, as in `attention`."""
        target = target_of(out.vdevice)
        resolver = resolver_or_default(target)
        problem = cached_attention_problem(call, out, resolver.page_order(target))
        problem = resolver.general_problem(problem, target)
        rows, heads = problem.out.shape[0], [problem.heads, problem.kv_heads, problem.size]
        name = f"{problem.rows}_attention_{shape_text([rows, *heads])}_{self._names.device(target)}"
        ops = ["rms_norm"] * bool(problem.norms) + ["rotary"] * bool(problem.rotary)
        ops += ["append", "matmul", "softmax", "matmul"]
        return self._kernel_and_scratch(problem, target, name, ops, op_text, out.vdevice)

    def append(self, call: relax.Call, out: relax.TensorType, op_text: str) -> tvm.ir.GlobalVar | None:
        """The kernel that writes new keys and values into their pages; None if `cached_attention` does it."""
        target = target_of(out.vdevice)
        resolver = resolver_or_default(target)
        problem = cached_attention_problem(call, out, resolver.page_order(target))
        if not resolver.appends_in_own_kernel(problem):
            return None
        problem = replace(problem, rows=APPEND)
        sizes = [problem.out.shape[0], problem.kv_heads, problem.size]
        ops = ["rms_norm"] * ("k" in problem.norms) + ["rotary"] * bool(problem.rotary) + ["append"]
        return self._kernel(problem, target, f"append_{shape_text(sizes)}_{self._names.device(target)}", ops, op_text)

    def _kernel_and_scratch(
        self,
        problem: AttentionProblem | CachedAttentionProblem,
        target: tvm.target.Target,
        name: str,
        ops: Sequence[str],
        op_text: str,
        vdevice: relax.VDevice,
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType | None]:
        kernel = self._kernel(problem, target, name, ops, op_text)
        params = self.functions[kernel].params
        if len(params) == len(problem.parameters):
            return kernel, None
        scratch = params[-1]
        return kernel, relax.TensorType(list(scratch.shape), str(scratch.dtype), vdevice)

    def quantized_matmul(
        self, problem: QuantizedMatmulProblem, result: relax.TensorType, op_text: str
    ) -> tvm.ir.GlobalVar:
        """The kernel of a product with block-quantized weights."""
        target = target_of(result.vdevice)
        epilogue = [EXPERT_SUM] if problem.shares else []
        epilogue += _op_names(problem.epilogue.expression if problem.epilogue else None)
        sizes = [*problem.result.shape, problem.depth]
        name = "_".join(["block_matmul", shape_text(sizes), self._names.device(target), *epilogue[:_MAX_NAMED_OPS]])
        return self._kernel(problem, target, name, ["block_matmul", *epilogue], op_text)

    def unpacked_matmul(
        self, problem: QuantizedMatmulProblem, result: relax.TensorType, op_text: str
    ) -> tuple[tvm.ir.GlobalVar, relax.TensorType, tvm.ir.GlobalVar, int] | None:
        """Two kernels for a product of many rows: dequantize the weights, and multiply.

        Returns
        -------
        dequantize_kernel, dequantized_type, matmul_kernel, num_weights
            Kernels, type of the first one's result, and its number of operands. None if one kernel on the quantized
            weights is better on this target.
        """
        target = target_of(result.vdevice)
        layout = resolver_or_default(target).unpacked_layout(problem, target)
        if layout is None:
            return None
        dequantized = Operand((problem.depth, problem.columns), problem.lhs.dtype, ("k", "n"), layout)
        sizes, device = [problem.columns, problem.depth], self._names.device(target)
        # Products of the same weight with different left operands share the kernel.
        one_row = replace(problem, lhs=_one_row(problem.lhs), result=_one_row(problem.result), epilogue=None)
        name = f"block_unpack_{shape_text(sizes)}_{device}"
        unpack = BlockUnpackProblem(one_row, dequantized)
        dequantize_kernel = self._kernel(unpack, target, name, ["block_unpack"], op_text)
        product = MatmulProblem(problem.lhs, dequantized, problem.result, "float32", epilogue=problem.epilogue)
        epilogue = _op_names(problem.epilogue.expression if problem.epilogue else None)
        name = "_".join(
            ["matmul", shape_text([*problem.result.shape, problem.depth]), device, *epilogue[:_MAX_NAMED_OPS]]
        )
        matmul_kernel = self._kernel(product, target, name, ["block_matmul", *epilogue], op_text)
        shape = [int(extent) for extent in layout.packed_shape([problem.depth, problem.columns])]
        ty = relax.TensorType(shape, problem.lhs.dtype, result.vdevice)
        return dequantize_kernel, ty, matmul_kernel, len(problem.weights)

    def expert_order(
        self, problem: QuantizedMatmulProblem, result: relax.TensorType, op_text: str
    ) -> tuple[QuantizedMatmulProblem, tvm.ir.GlobalVar, relax.TensorType] | None:
        """A product of sorted pairs of tokens and experts, the kernel that sorts them, and the type of its result.

        None if the product's kernel reads the experts' numbers.
        """
        target = target_of(result.vdevice)
        order = resolver_or_default(target).expert_order(problem, target)
        if order is None:
            return None
        name = f"expert_order_{shape_text([*order.index.shape, order.experts])}_{self._names.device(target)}"
        kernel = self._kernel(order, target, name, ["expert_order"], op_text)
        ty = relax.TensorType(list(order.result.shape), order.result.dtype, result.vdevice)
        return replace(problem, order=order), kernel, ty

    def block_rows(self, call: relax.Call, result: relax.TensorType, op_text: str) -> tvm.ir.GlobalVar:
        """The kernel that dequantizes rows of block-quantized weights."""
        target = target_of(result.vdevice)
        problem = block_rows_problem(call, result)
        name = f"block_rows_{shape_text(problem.result.shape)}_{self._names.device(target)}"
        return self._kernel(problem, target, name, ["block_rows"], op_text)

    def panel_fragments(self, call: relax.Call, result: relax.TensorType, op_text: str) -> tvm.ir.GlobalVar:
        """The kernel that turns panels of a CPU into a part of the fragments of a GPU."""
        target = target_of(result.vdevice)
        problem = panel_fragments_problem(call, result)
        name = f"panel_fragments_{problem.part}_{shape_text(problem.result.shape)}_{self._names.device(target)}"
        return self._kernel(problem, target, name, ["panel_fragments"], op_text)

    def relayout(self, source: Stored, result: Stored, op_text: str) -> tvm.ir.GlobalVar:
        """The kernel that packs a row-major tensor, unpacks to a row-major one, or converts between other layouts."""
        target = target_of(result.ty.vdevice)
        symbols = Symbols()
        shape = tuple(symbols.dim(extent) for extent in result.ty.shape.values)
        dtype = str(result.ty.dtype)
        layouts = source.layout, result.layout
        op = "pack" if source.layout.is_identity else "unpack" if result.layout.is_identity else "relayout"
        index_map = tuple(f"d{i}" for i in range(len(shape)))
        operands = [Operand(shape, dtype, index_map, stored.layout) for stored in (source, result)]
        name = f"{op}_{shape_text(shape)}_{self._names.device(target)}"
        key = (op, shape, dtype, *layouts)

        def make() -> tirx.PrimFunc:
            return _checked(_relayout_kernel(shape, dtype, *layouts, target), operands, target, op_text)

        return self._get(key, target, name, [op], make)

    def _kernel(
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
            except Exception as error:  # a third party's resolver can raise anything, and does not name the op
                raise EncodingError(
                    f"{op_text}: resolver {resolver.name!r} wrote no kernel for target {target}: "
                    f"{type(error).__name__}: {error}"
                ) from error
            may_have_scratch = isinstance(problem, (AttentionProblem, CachedAttentionProblem))
            return _checked(
                func, problem.parameters, target, f"{op_text}, resolver {resolver.name!r}", may_have_scratch
            )

        return self._get(problem, target, name, ops, make)

    def _get(
        self, key: Any, target: tvm.target.Target, name: str, ops: Sequence[str], make: Callable[[], tirx.PrimFunc]
    ) -> tvm.ir.GlobalVar:
        """The kernel of a computation that `key` describes completely; `make` writes it on the first request."""
        full_key = (key, str(target))
        if full_key not in self._kernels:
            func = opaque_kernel(make()).with_attr({"target": target, OPS: list(ops), **work_attributes(key)})
            self._kernels[full_key] = self._added(func, name)
            self._problems[self._kernels[full_key]] = key
        return self._kernels[full_key]

    def _added(self, kernel: tirx.PrimFunc, name: str) -> tvm.ir.GlobalVar:
        gvar = fresh_global_var(name, kernel.ty, self._used_names)
        self.functions[gvar] = kernel
        return gvar


def _relayout_kernel(
    shape: tuple[Dim, ...], dtype: str, source: PackedLayout, result: PackedLayout, target: tvm.target.Target
) -> tirx.PrimFunc:
    """The kernel that changes a tensor's layout; its generator is imported only here, when it is needed."""
    if "gpu" in target.keys:
        from ...tir.cuda.cuda_pack import relayout_kernel

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


def _with_named_functions(expression: Expression, result: Stored) -> Expression:
    """The expression with activations as named functions, which lack float64 forms."""
    return expression if str(result.ty.dtype) == "float64" else named(expression)


def _op_names(expression: Expression | None) -> list[str]:
    """The ops of an expression, each once, in order."""
    if expression is None:
        return []
    return list(dict.fromkeys(term.op for term in expression.terms() if term.op not in ("operand", "number")))


def _checked(
    func: Any, operands: Sequence[Operand], target: tvm.target.Target, op_text: str, may_have_scratch: bool = False
) -> tirx.PrimFunc:
    """Return `func` if its parameters are buffers for `operands`, and optionally one of scratch, of any shape.

    Any other kernel would misinterpret memory.
    """
    prefix = f"{op_text}, on target {target}: found"
    if not isinstance(func, tirx.PrimFunc):
        raise EncodingError(f"{prefix} {type(func).__name__}, expected a PrimFunc")
    num_scratch = len(func.params) - len(operands)
    if num_scratch not in (0, int(may_have_scratch)) or not all(map(is_buffer_var, func.params)):
        count = f"{len(operands)} buffers{' and perhaps one of scratch' if may_have_scratch else ''}"
        raise EncodingError(f"{prefix} a kernel of parameters {list(func.params)}, expected {count}")
    for index, (buffer, operand) in enumerate(zip(func.params, operands, strict=False)):
        _check_buffer(buffer, operand, f"{prefix} parameter {index}")
    return func


def _check_buffer(buffer: tirx.Buffer, operand: Operand, prefix: str) -> None:
    if str(buffer.dtype) != operand.dtype:
        raise EncodingError(f"{prefix} of type {buffer.dtype}, expected {operand.dtype}")
    expected = _buffer_extents(operand)
    extents = [int(extent) if isinstance(extent, tirx.IntImm) else None for extent in buffer.shape]
    if len(extents) != len(expected) or any(
        a is not None and b is not None and a != b for a, b in zip(extents, expected, strict=True)
    ):
        raise EncodingError(f"{prefix} of shape {list(buffer.shape)}, expected {expected} (None: symbolic)")


def _buffer_extents(operand: Operand) -> list[int | None]:
    """The extents of an operand's buffer, None for a symbolic one."""
    shape = [tirx.Var(extent, "int64") if isinstance(extent, str) else extent for extent in operand.shape]
    return [extent if isinstance(extent, int) else None for extent in operand.layout.packed_shape(shape)]
