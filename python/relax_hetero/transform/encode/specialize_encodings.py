"""SpecializeEncodings: give every encoded value the layout of its device.

Before::

    a = R.hetero.set_encoding(x, "matmul[0]<...>")                            # on llvm:0
    b = R.hetero.set_encoding(w, "matmul[1]<...>")
    c = R.hetero.matmul(a, b, encoding="matmul[2]<...>")
    d = R.to_vdevice(c, "c:0")                                                # used by encoded ops there

After::

    a = R.hetero.set_encoding(x, "matmul[0]<...>", layout="identity<2>")
    b = R.hetero.set_encoding(w, "matmul[1]<...>", layout="pack<outer=[1, 0] inner=[1:32]>")
    c = R.hetero.matmul(a, b, encoding="matmul[2]<...>", layout="identity<2>", kernel="matmul_DxDxD_llvm_0")
    c_laid_out = R.hetero.relayout(c, ..., layout="pack<...>", from_layout="identity<2>")
    d = R.to_vdevice(c_laid_out, "c:0")

The resolver for a value's device chooses the layout: for an op's result the device that executes the op, for a transfer
its destination. Where a device lacks a resolver, or the resolver a layout for an operand of a product, the product and
all ops on its encoded values become stock ops again. A tensor that is transferred to a device with another layout is
converted on the cheaper side, never reinterpreted. (IREE's pass of this name is the model.)

Assumes a placed module (RealizeVDevice). Existing layouts are kept, and a second run changes nothing. The sections of
this file: the report of a module's encodings, layouts that resolvers choose, with checks, and the pass.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, tirx

from ...encoding.encoding import CONVOLUTIONS, DYNAMIC, LHS, RESULT, RHS, Encoding
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout, unsupported_reason
from ...encoding.resolver import EncodingResolver, resolver_for, resolver_or_default
from ...errors import EncodingError
from ...op import encoded as ops
from ...op.encoded import CONV, ELEMENTWISE, PREPACKED, PRODUCTS, RELAYOUT, SET, UNSET, encoded_op
from ...target.vdevice import device_name, vdevices_of
from ..ir.blocks import Block, rewrite_blocks, without_unused
from ..ir.callee_devices import target_of
from ..ir.declare import declare_pass
from ..ir.op_names import TRANSFER
from ..ir.remarks import is_collecting, publish
from ..ir.reports import CancelledEntry, EncodedOpEntry, EncodedTransferEntry, EncodingReport, OperandEntry, Size
from ..ir.rewriting import map_bindings, op_name, relax_functions, typed, walk_bindings, with_functions
from .cancel_encodings import stock_elementwise, stock_product
from .encoded_values import Stored, layout_of
from .encoding_kernels import VariantNames
from .epilogues import Chain, fused_variables
from .hoist_encodings import FOLDED_OPS
from .kernel_problems import product_problem
from .relayout_transfers import Crossing, transferred
from .replaced_bindings import Merges, Replacement, dataflow_variables, error_context
from .verify_encodings import verify_encodings

# Report of a module's encodings: ops, layouts, sizes and encoded transfers.


def describe_encodings(mod: tvm.IRModule, cancelled: Sequence[CancelledEntry] = ()) -> EncodingReport:
    """Report of the encodings of a module, at any stage between SetEncoding and MaterializeEncodings.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed module.
    cancelled : sequence of CancelledEntry
        Encodings that SpecializeEncodings cancelled, which the module does not contain any more.

    Returns
    -------
    EncodingReport
        Report; before SpecializeEncodings, layouts are empty and sizes are those of the unpacked tensors.
    """
    report = EncodingReport(cancelled=list(cancelled))
    vdevices = vdevices_of(mod)
    for gv, func in relax_functions(mod):
        builder = _ReportBuilder(gv.name_hint, func, vdevices)
        for binding in walk_bindings(func):
            if encoded_op(binding.value) in (*PRODUCTS, ELEMENTWISE):
                report.ops += builder.op(binding)
            elif op_name(binding.value) == TRANSFER and binding.var in builder.encoded:
                report.transfers.append(builder.transfer(binding))
    return report


def name_in_model(var: relax.Var) -> str:
    """Name of a value in the source model: SetEncoding and PropagateEncodings append ``_encoded`` to it."""
    return str(var.name).removesuffix("_encoded")


def product_name(call: relax.Call) -> str:
    """Name of an encoded product in reports: "matmul" (also batched) or "conv2d"."""
    op_type = Encoding.parse(str(call.attrs.encoding)).op_type
    return op_type if op_type in CONVOLUTIONS else "matmul"


@dataclass(frozen=True)
class _EncodedTensor:
    """Encoding and layout as text, and when or how the tensor is packed (see `OperandEntry`; empty if never)."""

    encoding: str
    layout: str
    packed: str


class _ReportBuilder:
    """Builder of the report's entries for one function."""

    def __init__(self, function: str, func: relax.Function, vdevices: Sequence[relax.VDevice]) -> None:
        self.function = function
        self.vdevices = vdevices
        self.encoded: dict[relax.Var, _EncodedTensor] = {}
        self.values: dict[relax.Var, relax.Expr] = {}
        self.users: dict[relax.Var, list[relax.Binding]] = defaultdict(list)
        for binding in walk_bindings(func):
            self.values[binding.var] = binding.value
            for var in _operands(binding.value):
                self.users[var].append(binding)
            encoded = self._encoded_result(binding)
            if encoded is not None:
                self.encoded[binding.var] = encoded
        self.fused = fused_variables(func)
        self.products: dict[relax.Var, tuple[relax.Var, Chain]] = {}  # product and chain by the chain's last variable

    def op(self, binding: relax.Binding) -> list[EncodedOpEntry]:
        """The entry of a product, at the end of its chain of fused ops, or of a separate elementwise op."""
        var, call = binding.var, binding.value
        product, chain = var, Chain(call)
        if encoded_op(call) in PRODUCTS:
            roles = _roles(call)
        elif call.args[0] in self.products:
            product, chain = self.products.pop(call.args[0])
            chain = chain.then(call)
            roles = _roles(chain.product)
        else:
            roles = [(f"x{index}", arg) for index, arg in enumerate(call.args)]
            chain = Chain(call, Expression.parse(str(call.attrs.expression)))
        if var in self.fused:
            self.products[var] = product, chain
            return []
        roles += [(f"x{index}", arg) for index, arg in enumerate(chain.epilogue_operands, 1)]
        is_product = encoded_op(chain.product) in PRODUCTS
        has_epilogue = is_product and chain.expression != Expression.operand(0)
        entry = EncodedOpEntry(
            function=self.function,
            variable=name_in_model(product),
            op=product_name(chain.product) if is_product else str(chain.expression),
            device=self._device(var),
            kernel=str(chain.product.attrs.kernel) if is_product else "",
            operands=tuple(self._operand(role, arg) for role, arg in (*roles, ("result", var)) if arg in self.encoded),
            epilogue=str(chain.expression) if has_epilogue else "",
            form=self._convolution_form(chain.product) if encoded_op(chain.product) == CONV else "",
        )
        return [entry]

    def _convolution_form(self, call: relax.Call) -> str:
        """Algorithm of a convolution, and why it was chosen; empty before SpecializeEncodings."""
        if not call.attrs.kernel:
            return ""
        stored = self.encoded.get(call.args[RHS])
        if stored is None or not stored.layout:
            return ""
        encoding, layout = Encoding.parse(str(call.attrs.encoding)), PackedLayout.parse(stored.layout)
        target = target_of(call.ty.vdevice)
        return resolver_or_default(target).convolution_form(encoding, target, layout)

    def transfer(self, binding: relax.Binding) -> EncodedTransferEntry:
        """The entry of a transfer of an encoded tensor."""
        source = binding.value.args[0]
        layout = self.encoded[source].layout
        producer, users = self.values.get(source), self.users[binding.var]
        relayout = ""
        if encoded_op(producer) == RELAYOUT:
            relayout = self._relayout(source, producer)
        elif len(users) == 1 and encoded_op(users[0].value) == RELAYOUT:
            relayout = self._relayout(users[0].var, users[0].value)
        return EncodedTransferEntry(
            function=self.function,
            variable=name_in_model(binding.var),
            source=self._device(source),
            destination=self._device(binding.var),
            layout=layout,
            bytes=_bytes(binding.var.ty, layout),
            relayout=relayout,
        )

    def _relayout(self, var: relax.Var, call: relax.Call) -> str:
        return f"on {self._device(var)}: {call.attrs.from_layout} to {call.attrs.layout}"

    def _encoded_result(self, binding: relax.Binding) -> _EncodedTensor | None:
        value, name = binding.value, encoded_op(binding.value)
        if op_name(value) == TRANSFER:
            source = self.encoded.get(value.args[0])
            return source and _EncodedTensor(source.encoding, source.layout, source.packed and "by transfer")
        if name is None or name == UNSET:
            return None
        layout, packed = str(value.attrs.layout), "by op"
        stored = PackedLayout.parse(layout) if layout else None
        if stored is None or stored.is_identity:
            packed = ""
        elif name in (SET, PREPACKED, RELAYOUT):
            at_run_time = "at run time" if stored.inner_dims else "as a permutation"
            packed = at_run_time if isinstance(value.args[0], relax.Var) else "at compile time"
        return _EncodedTensor(str(value.attrs.encoding), layout, packed)

    def _operand(self, role: str, var: relax.Var) -> OperandEntry:
        encoded, ty = self.encoded[var], var.ty
        return OperandEntry(
            role=role,
            variable=str(var.name),
            shape="x".join(map(_extent_text, ty.shape.values)) if ty.shape is not None else "?",
            dtype=str(ty.dtype),
            encoding=encoded.encoding,
            layout=encoded.layout,
            bytes_before=_bytes(ty, ""),
            bytes_after=_bytes(ty, encoded.layout),
            packed=encoded.packed or "never",
        )

    def _device(self, var: relax.Var) -> str:
        return device_name(var.ty.vdevice, self.vdevices) if var.ty.vdevice is not None else ""


def _roles(call: relax.Call) -> list[tuple[str, relax.Expr]]:
    """A product's operands with their roles."""
    encoding = Encoding.parse(str(call.attrs.encoding))
    names = (encoding.of(LHS).operand_name, encoding.of(RHS).operand_name, "init")
    return [*zip(names, call.args, strict=False)]


def _operands(value: relax.Expr) -> Iterator[relax.Var]:
    """Variables among a call's arguments, with tuples flattened."""
    fields = value.args if isinstance(value, relax.Call) else getattr(value, "fields", ())
    for field in fields:
        if isinstance(field, relax.Var):
            yield field
        elif isinstance(field, relax.Tuple):
            yield from _operands(field)


def _bytes(ty: relax.TensorType, layout: str) -> Size:
    """Size of a tensor in bytes under a layout ("": row-major), as an expression if an extent is symbolic."""
    if ty.shape is None:
        return "?"
    stored = PackedLayout.parse(layout) if layout else PackedLayout.identity(len(ty.shape.values))
    size = stored.storage_bytes(list(ty.shape.values), str(ty.dtype))
    if not isinstance(size, int):
        size = tvm.sym.Analyzer().simplify(size)
    return int(size) if isinstance(size, (int, tvm.tirx.IntImm)) else _extent_text(size)


def _extent_text(extent: Any) -> str:
    """An extent without TVMScript's ``T.int64(...)`` around its numbers."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(extent))


# Layouts that resolvers choose, requested once and checked.


class Layouts:
    """Cache of layouts by encoding and target; a product without layouts has the reason as text instead."""

    def __init__(self) -> None:
        self._resolvers: dict[str, EncodingResolver | None] = {}
        self._products: dict[tuple[Encoding, str], tuple[PackedLayout, ...] | str] = {}
        self._activations: dict[tuple[Encoding, str], PackedLayout | None] = {}

    def resolver(self, target: tvm.target.Target) -> EncodingResolver | None:
        """The resolver of a target."""
        key = str(target)
        if key not in self._resolvers:
            self._resolvers[key] = resolver_for(target)
        return self._resolvers[key]

    def layout(self, encoding: Encoding, target: tvm.target.Target, var_text: str) -> PackedLayout | None:
        """The layout of an operand; None if its product lacks layouts on this target.

        `var_text`: variable, for messages. Raises EncodingError if the resolver raises, or returns an object that is
        not a layout of the operand's rank.
        """
        layouts = self._layouts(encoding, target, var_text)
        return None if isinstance(layouts, str) else layouts[encoding.operand_index]

    def layout_of_activation(self, encoding: Encoding, target: tvm.target.Target, var_text: str) -> PackedLayout | None:
        """The layout of an operand that is not a constant, so that it is packed at run time; see `layout`."""
        layout = self.layout(encoding, target, var_text)
        resolver = self.resolver(target)
        if resolver is None or layout is None:
            return layout
        key = (encoding, str(target))
        if key not in self._activations:
            self._activations[key] = _checked_layout(resolver, resolver.resolve_activation, encoding, target, var_text)
        return self._activations[key]

    def missing_reason(self, encoding: Encoding, target: tvm.target.Target) -> str:
        """The reason why a product lacks layouts; empty if it has them."""
        layouts = self._layouts(encoding, target, "")
        return layouts if isinstance(layouts, str) else ""

    def _layouts(self, encoding: Encoding, target: tvm.target.Target, var_text: str) -> tuple[PackedLayout, ...] | str:
        key = (encoding.of(RESULT), str(target))
        if key not in self._products:
            self._products[key] = self._resolve(key[0], target, var_text)
        return self._products[key]

    def _resolve(self, encoding: Encoding, target: tvm.target.Target, var_text: str) -> tuple[PackedLayout, ...] | str:
        resolver = self.resolver(target)
        if resolver is None:
            return f"no resolver for target kind {target.kind.name!r}"
        layouts = []
        for index in (LHS, RHS, RESULT):
            operand = encoding.of(index)
            layout = _checked_layout(resolver, resolver.resolve, operand, target, var_text)
            if layout is None:
                return f"resolver {resolver.name!r} has no layout for the {operand.operand_name} of {encoding}"
            _check_size(resolver, operand, layout, target)
            layouts.append(layout)
        return tuple(layouts)


def _checked_layout(
    resolver: EncodingResolver,
    resolve: Callable[[Encoding, tvm.target.Target], PackedLayout | None],
    operand: Encoding,
    target: tvm.target.Target,
    var_text: str,
) -> PackedLayout | None:
    """The layout that a resolver's method returns for an operand, checked."""
    prefix = f"resolver {resolver.name!r}, asked how target {target} stores {operand} for {var_text}"
    try:
        layout = resolve(operand, target)
    except EncodingError:
        raise
    except Exception as error:  # a third party's resolver can raise anything, and does not name the op
        raise EncodingError(f"{prefix}: {type(error).__name__}: {error}") from error
    rank = len(operand.index_map)
    if layout is not None and (not isinstance(layout, PackedLayout) or len(layout.outer_perm) != rank):
        raise EncodingError(f"{prefix}: found {layout!r}, expected a PackedLayout of {rank} dimensions, or None")
    reason = "" if layout is None else unsupported_reason(layout, operand)
    if reason:
        raise EncodingError(f"{prefix}: {reason}")
    return layout


def _check_size(resolver: EncodingResolver, operand: Encoding, layout: PackedLayout, target: tvm.target.Target) -> None:
    """Check that a resolver's storage size is enough for its layout, if the shape is static."""
    shape = operand.shape()
    if DYNAMIC in shape:
        return
    size, needed = resolver.storage_size(operand, shape, target), layout.storage_bytes(shape, operand.element_type)
    if not isinstance(size, (int, tirx.IntImm)) or int(size) < needed:
        raise EncodingError(
            f"resolver {resolver.name!r} says that {operand} takes {size} bytes on target {target}; expected at least "
            f"{needed}, those of its layout {layout}"
        )


def specialize_encodings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    EncodingError
        When it runs: a resolver returns an object that is not a layout of the operand.
    """
    verify_encodings(mod)
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    layouts, names = Layouts(), VariantNames(mod, vdevices_of(mod))
    cancelled: list[CancelledEntry] = []
    for gv, func in relax_functions(mod):
        functions[gv] = _Specializer(gv.name_hint, layouts, names, cancelled, mod).specialize(func)
    mod = rewrite_blocks(with_functions(mod, functions), _without_unused_packing)
    verify_encodings(mod)
    if is_collecting():
        publish(describe_encodings(mod, cancelled))
    return mod


SpecializeEncodings = declare_pass("SpecializeEncodings", specialize_encodings)


def _without_unused_packing(block: Block) -> list[relax.Binding] | None:
    """The block's bindings without unused `set_encoding` ops, left over where the plain tensor is transferred."""
    bindings = without_unused(block.bindings, block, lambda value: encoded_op(value) == SET)
    return bindings if len(bindings) < len(block.bindings) else None


class _Specializer:
    """Rewriter of one function."""

    def __init__(
        self, name: str, layouts: Layouts, names: VariantNames, cancelled: list[CancelledEntry], mod: tvm.IRModule
    ) -> None:
        self.name = name
        self.layouts = layouts
        self.names = names
        self.cancelled = cancelled
        self.vdevices = vdevices_of(mod)
        # Encoding and layout of each encoded value; None instead of a layout if the encoding is cancelled.
        self.values: dict[relax.Var, tuple[Encoding, PackedLayout | None]] = {}
        self.merges = Merges()
        self.dataflow_vars: set[relax.Var] = set()
        self.specialized: set[relax.Var] = set()  # values that had a layout before the pass, and their transfers
        self.plain: dict[relax.Var, relax.Expr] = {}  # plain tensor of each set_encoding
        self.constants: set[relax.Var] = set()  # hold constants, which are packed at compile time

    def specialize(self, func: relax.Function) -> relax.Function:
        self.dataflow_vars = dataflow_variables(func)
        return self.merges.apply(map_bindings(func, error_context(self._rewrite, self.name)))

    def _rewrite(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        name = encoded_op(binding.value)
        if name is not None:
            return self._rewrite_encoded(name, binding)
        if op_name(binding.value) == TRANSFER and binding.value.args[0] in self.values:
            return self._rewrite_transfer(binding)
        if isinstance(binding.value, relax.Var) and binding.value in self.values:
            self.values[binding.var] = self.values[binding.value]
        source = binding.value.args[0] if op_name(binding.value) in FOLDED_OPS else binding.value
        if self._is_constant(source):
            self.constants.add(binding.var)
        return binding

    def _rewrite_encoded(self, name: str, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        var, call = binding.var, binding.value
        encoding = Encoding.parse(call.attrs.encoding)
        layout = layout_of(call) or self._layout(encoding, var, name == SET and not self._is_constant(call.args[0]))
        operands = [self.merges.resolve(arg) for arg in call.args]
        if name != UNSET:
            self.values[var] = (encoding, layout)
        if name == SET:
            self.plain[var] = operands[0]
        if call.attrs.layout:
            self.specialized.add(var)
        if layout is None:
            return self._cancel_op(name, encoding, binding, operands)
        if call.attrs.layout:
            return binding
        if name in PRODUCTS:
            kernel = self._kernel(encoding, layout, binding)
            op_builder = ops.conv if name == CONV else ops.matmul
            new = op_builder(*operands, encoding=encoding, layout=layout, kernel=kernel)
        elif name == ELEMENTWISE:
            new = ops.elementwise(*operands, expression=call.attrs.expression, encoding=encoding, layout=layout)
        else:
            new = (ops.set_encoding if name == SET else ops.unset_encoding)(operands[0], encoding, layout)
        return relax.VarBinding(var, typed(new, call.ty), binding.span)

    def _layout(self, encoding: Encoding, var: relax.Var, is_activation: bool = False) -> PackedLayout | None:
        layout_of_operand = self.layouts.layout_of_activation if is_activation else self.layouts.layout
        return layout_of_operand(
            encoding, target_of(var.ty.vdevice), f"variable {var.name!r} in function {self.name!r}"
        )

    def _is_constant(self, expr: relax.Expr) -> bool:
        return isinstance(expr, tvm.ir.GenericConst) or (isinstance(expr, relax.Var) and expr in self.constants)

    def _kernel(self, encoding: Encoding, layout: PackedLayout, binding: relax.Binding) -> str:
        operands = [self._stored(arg) for arg in binding.value.args]
        problem = product_problem(encoding, operands, Stored(binding.var.ty, layout))
        return self.names.name(problem, target_of(binding.var.ty.vdevice))

    def _stored(self, expr: relax.Expr) -> Stored:
        encoded = self.values.get(expr) if isinstance(expr, relax.Var) else None
        return Stored.plain(expr.ty) if encoded is None or encoded[1] is None else Stored(expr.ty, encoded[1])

    def _cancel_op(
        self, name: str, encoding: Encoding, binding: relax.Binding, operands: list[relax.Expr]
    ) -> relax.Binding | list[relax.Binding]:
        var, call = binding.var, binding.value
        if name == SET:
            return self.merges.drop(var, operands[0])
        if name == UNSET:
            return self.merges.alias(var, operands[0])
        out = Replacement(var, var in self.dataflow_vars)
        if name == ELEMENTWISE:
            return stock_elementwise(Expression.parse(call.attrs.expression), operands, out)
        vdevice = var.ty.vdevice
        device = device_name(vdevice, self.vdevices) if vdevice is not None else ""
        reason = self.layouts.missing_reason(encoding, target_of(vdevice))
        self.cancelled.append(CancelledEntry(self.name, name_in_model(var), product_name(call), device, reason))
        return stock_product(encoding, operands, out)

    def _rewrite_transfer(self, binding: relax.Binding) -> relax.Binding | list[relax.Binding]:
        """Rewrite the transfer of a tensor that is encoded on one device, or on both."""
        var, call = binding.var, binding.value
        source = call.args[0]
        encoding, source_layout = self.values[source]
        if source in self.specialized:
            self.values[var] = (encoding, source_layout)
            self.specialized.add(var)
            return binding
        layout = self._layout(encoding, var)
        self.values[var] = (encoding, layout)
        out = Replacement(var, var in self.dataflow_vars)
        value = self.merges.resolve(source)
        if source_layout is None and layout is None:
            return binding
        if source_layout is not None and layout is not None:
            if source_layout == layout:
                return binding
            crossing = Crossing(encoding, source.ty, source.ty.vdevice, var.ty.vdevice, source_layout, layout)
            return transferred(value, crossing, out)
        if source in self.plain:
            value = self.plain[source]
        elif source_layout is not None:
            value = out.bind(ops.unset_encoding(value, encoding, source_layout), source.ty, "plain")
        value = out.bind(relax.op.to_vdevice(value, var.ty.vdevice), var.ty, "there")
        if layout is not None:
            value = out.bind(ops.set_encoding(value, encoding, layout), var.ty, "encoded")
        return out.finish(value)
