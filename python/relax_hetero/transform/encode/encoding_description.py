"""Reads from a module what is encoded in it: ops, layouts, sizes and encoded transfers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from ...encoding.encoding import CONVOLUTIONS, LHS, RHS, Encoding
from ...encoding.expression import Expression
from ...encoding.packed_layout import PackedLayout
from ...encoding.resolver import answers_of
from ...op.encoded import CONV, ELEMENTWISE, PREPACKED, PRODUCTS, RELAYOUT, SET, UNSET, encoded_op
from ...target.vdevice import device_name, vdevices_of
from ..ir.op_names import TRANSFER
from ..ir.reports import CancelledEntry, EncodedOpEntry, EncodedTransferEntry, EncodingReport, OperandEntry, Size
from ..ir.rewriting import op_name, relax_functions, walk_bindings
from ..ir.targets import target_of
from .epilogues import Chain, fused_variables


def describe_encodings(mod: tvm.IRModule, cancelled: Sequence[CancelledEntry] = ()) -> EncodingReport:
    """Report of the encodings of a module, at any stage between SetEncoding and MaterializeEncodings.

    Parameters
    ----------
    mod : tvm.IRModule
        A placed module.
    cancelled : sequence of CancelledEntry
        Encodings that SpecializeEncodings cancelled; a module does not remember them.

    Returns
    -------
    EncodingReport
        Layouts are empty, and sizes after packing those before it, where the module is not specialized yet.
    """
    report = EncodingReport(cancelled=list(cancelled))
    vdevices = vdevices_of(mod)
    for gv, func in relax_functions(mod):
        reader = _Reader(gv.name_hint, func, vdevices)
        for binding in walk_bindings(func):
            if encoded_op(binding.value) in (*PRODUCTS, ELEMENTWISE):
                report.ops += reader.op(binding)
            elif op_name(binding.value) == TRANSFER and binding.var in reader.encoded:
                report.transfers.append(reader.transfer(binding))
    return report


def name_in_model(var: relax.Var) -> str:
    """The name of a value before SetEncoding and PropagateEncodings, which call its encoded form ``<name>_encoded``."""
    return str(var.name).removesuffix("_encoded")


def product_name(call: relax.Call) -> str:
    """Name of an encoded product in reports: "matmul", batched or not, or "conv2d"."""
    op_type = Encoding.parse(str(call.attrs.encoding)).op_type
    return op_type if op_type in CONVOLUTIONS else "matmul"


@dataclass(frozen=True)
class _Encoded:
    encoding: str
    layout: str
    packed: str


class _Reader:
    """One function: which variables hold encoded tensors, who uses them, what is fused into which product."""

    def __init__(self, function: str, func: relax.Function, vdevices: Sequence[relax.VDevice]) -> None:
        self.function = function
        self.vdevices = vdevices
        self.encoded: dict[relax.Var, _Encoded] = {}
        self.values: dict[relax.Var, relax.Expr] = {}
        self.users: dict[relax.Var, list[relax.Binding]] = defaultdict(list)
        for binding in walk_bindings(func):
            self.values[binding.var] = binding.value
            for var in _operands(binding.value):
                self.users[var].append(binding)
            found = self._made_by(binding)
            if found is not None:
                self.encoded[binding.var] = found
        self.fused = fused_variables(func)
        self.products: dict[relax.Var, tuple[relax.Var, Chain]] = {}

    def op(self, binding: relax.Binding) -> list[EncodedOpEntry]:
        """The entry of a product with what is fused into it, at its end, or of elementwise work that stands alone."""
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
        roles += [(f"x{index}", arg) for index, arg in enumerate(chain.others, 1)]
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
            form=self._form(chain.product) if encoded_op(chain.product) == CONV else "",
        )
        return [entry]

    def _form(self, call: relax.Call) -> str:
        """How a convolution is computed, and why; empty before SpecializeEncodings."""
        if not call.attrs.kernel:
            return ""
        stored = self.encoded.get(call.args[RHS])
        if stored is None or not stored.layout:
            return ""
        encoding, layout = Encoding.parse(str(call.attrs.encoding)), PackedLayout.parse(stored.layout)
        target = target_of(call.ty.vdevice)
        return answers_of(target).convolution_form(encoding, target, layout)

    def transfer(self, binding: relax.Binding) -> EncodedTransferEntry:
        """The entry of a transfer of an encoded tensor."""
        source = binding.value.args[0]
        on_wire = self.encoded[source]
        before, after = self.values.get(source), self.users[binding.var]
        relayout = ""
        if encoded_op(before) == RELAYOUT:
            relayout = self._relayout(source, before)
        elif len(after) == 1 and encoded_op(after[0].value) == RELAYOUT:
            relayout = self._relayout(after[0].var, after[0].value)
        return EncodedTransferEntry(
            function=self.function,
            variable=name_in_model(binding.var),
            source=self._device(source),
            destination=self._device(binding.var),
            layout=on_wire.layout,
            bytes=_bytes(binding.var.ty, on_wire.layout),
            relayout=relayout,
        )

    def _relayout(self, var: relax.Var, call: relax.Call) -> str:
        return f"on {self._device(var)}: {call.attrs.from_layout} to {call.attrs.layout}"

    def _made_by(self, binding: relax.Binding) -> _Encoded | None:
        value, name = binding.value, encoded_op(binding.value)
        if op_name(value) == TRANSFER:
            source = self.encoded.get(value.args[0])
            return source and _Encoded(source.encoding, source.layout, source.packed and "by transfer")
        if name is None or name == UNSET:
            return None
        layout, packed = str(value.attrs.layout), "by op"
        stored = PackedLayout.parse(layout) if layout else None
        if stored is None or stored.is_identity:
            packed = ""
        elif name in (SET, PREPACKED, RELAYOUT):
            in_a_call = "at run time" if stored.inner_dims else "as a permutation"
            packed = in_a_call if isinstance(value.args[0], relax.Var) else "at compile time"
        return _Encoded(str(value.attrs.encoding), layout, packed)

    def _operand(self, role: str, var: relax.Var) -> OperandEntry:
        found, ty = self.encoded[var], var.ty
        return OperandEntry(
            role=role,
            variable=str(var.name),
            shape="x".join(map(_text, ty.shape.values)) if ty.shape is not None else "?",
            dtype=str(ty.dtype),
            encoding=found.encoding,
            layout=found.layout,
            bytes_before=_bytes(ty, ""),
            bytes_after=_bytes(ty, found.layout),
            packed=found.packed or "never",
        )

    def _device(self, var: relax.Var) -> str:
        return device_name(var.ty.vdevice, self.vdevices) if var.ty.vdevice is not None else ""


def _roles(call: relax.Call) -> list[tuple[str, relax.Expr]]:
    """A product's operands, by what they are."""
    encoding = Encoding.parse(str(call.attrs.encoding))
    names = (encoding.of(LHS).operand_name, encoding.of(RHS).operand_name, "init")
    return [*zip(names, call.args, strict=False)]


def _operands(value: relax.Expr) -> Iterator[relax.Var]:
    """The variables among a call's arguments, tuples flattened."""
    fields = value.args if isinstance(value, relax.Call) else getattr(value, "fields", ())
    for field in fields:
        if isinstance(field, relax.Var):
            yield field
        elif isinstance(field, relax.Tuple):
            yield from _operands(field)


def _bytes(ty: relax.TensorType, layout: str) -> Size:
    """Bytes of a tensor under a layout, row-major for none; an expression where they depend on a symbolic extent."""
    if ty.shape is None:
        return "?"
    stored = PackedLayout.parse(layout) if layout else PackedLayout.identity(len(ty.shape.values))
    size = stored.storage_bytes(list(ty.shape.values), str(ty.dtype))
    if not isinstance(size, int):
        size = tvm.sym.Analyzer().simplify(size)
    return int(size) if isinstance(size, (int, tvm.tirx.IntImm)) else _text(size)


def _text(extent: Any) -> str:
    """An extent without TVMScript's ``T.int64(...)`` around its numbers."""
    return re.sub(r"T\.int64\((-?\d+)\)", r"\1", str(extent))
