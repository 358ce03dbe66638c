"""Which products of a function are computed in low precision, and which values are carried in it.

A value is carried if a product reads it, or an op that only moves elements to where one does. An elementwise op whose
result is carried wants those of its operands carried that were moved to it, since these are stored; averages and
resized images want theirs. What comes between two products in one kernel is in no memory and stays as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import tvm
from tvm import relax

from ...op.traits import ELEMENTWISE
from ..ir.blocks import used_vars
from ..ir.op_names import CAST
from ..ir.relax_expressions import to_expression
from ..ir.rewriting import handle, is_tensor_constant, op_name
from .name_filter import NameFilter, excluded_call
from .precision_devices import PrecisionDevices
from .precision_rules import (
    MOVING,
    NORMS,
    PRODUCTS,
    READ_EXACTLY,
    ROUNDED_ON_GPUS,
    STORED_ANYWAY,
    is_product,
    is_wide,
    low_constant,
)

_DEQUANTIZING = ("relax.multiply", "relax.divide", "relax.subtract", CAST)
_BYTES = ("int8", "uint8")
_BLOCKS = "relax.hetero.dequantize_blocks"


class LowPrecisionValues:
    """The decisions for one function.

    Parameters
    ----------
    func : relax.Function
    dtype : str
        The low type.
    excluded : NameFilter
    where : PrecisionDevices
        Devices whose products are rounded.

    Attributes
    ----------
    stored_low : set of relax.Var
        Values that exist in low precision; all that reads them reads them so, but for results of norms and their kin.
    products : set of relax.Var
        Results of products in low precision.
    ends : set of relax.Var
        Variables that the function, its branches and local functions end with: they keep their types.
    """

    def __init__(self, func: relax.Function, dtype: str, excluded: NameFilter, where: PrecisionDevices) -> None:
        self.stored_low: set[relax.Var] = set()
        self.products: set[relax.Var] = set()
        rounded = cache(lambda key: low_constant(self._constants[key], dtype))
        self._constants: dict[int, tvm.ir.GenericConst] = {}
        self._rounded: Callable[[int], tvm.ir.GenericConst | None] = rounded
        self._excluded, self._where, self._dtype = excluded, where, dtype
        self._bindings = list(_in_order(func.body))
        self._definitions = {binding.var: binding.value for binding in self._bindings}
        self._positions = {binding.var: position for position, binding in enumerate(self._bindings)}
        self.ends = {var for sequence in [func.body, *_inside(self._bindings)] for var in used_vars(sequence.body)}
        self._readers = Counter(var for binding in self._bindings for var in used_vars(binding.value))
        self._find_products()
        for binding in reversed(self._bindings):
            self._ask(binding)
        for binding in self._bindings:
            self._follow(binding)

    def constant(self, constant: tvm.ir.GenericConst) -> tvm.ir.GenericConst | None:
        """A constant rounded; None for one that has a number beyond the range of the low type."""
        key = handle(constant)
        self._constants[key] = constant
        return self._rounded(key)

    def is_moved(self, var: relax.Var) -> bool:
        """Return whether a value is elements of others, so that it can be made of these in low precision."""
        value = self._definitions.get(var)
        if value is None or not is_wide(var.ty) or excluded_call(self._excluded, var, value):
            return False
        if isinstance(value, relax.TupleGetItem):
            return isinstance(value.tuple_value, relax.Var) and self.is_moved(value.tuple_value)
        if isinstance(value, relax.Var):
            return True
        return isinstance(value, relax.Tuple) or op_name(value) in MOVING

    def is_rounded(self, var: relax.Var) -> bool:
        """True if all that reads a value reads it rounded: one that is carried, made here, and not exactly read."""
        if var not in self.stored_low or var not in self._definitions:
            return False
        if op_name(self._definitions[var]) not in READ_EXACTLY:
            return True
        return self._dtype in ROUNDED_ON_GPUS and self._where.is_gpu(var)

    def _find_products(self) -> None:
        """Forward: products whose operands fit into the low type and are not integers in disguise."""
        unfit: set[relax.Var] = set()
        for binding in self._bindings:
            var, value = binding.var, binding.value
            name = op_name(value)
            if name not in PRODUCTS and not self.is_moved(var):
                continue
            if any(arg in unfit or self._is_beyond(arg) for arg in _tensors(value)):
                unfit.add(var)
            elif name in PRODUCTS and is_product(value) and self._is_meant(var, value):
                if not any(self._is_of_bytes(arg) for arg in value.args):
                    self.products.add(var)

    def _is_meant(self, var: relax.Var, value: relax.Expr) -> bool:
        """Return whether the pass may change a call: its device is among those asked for, and nobody keeps it."""
        return self._where.has(var) and not excluded_call(self._excluded, var, value)

    def _is_beyond(self, expr: relax.Expr) -> bool:
        return is_tensor_constant(expr) and is_wide(expr.ty) and self.constant(expr) is None

    def _is_of_bytes(self, expr: relax.Expr) -> bool:
        """Return whether an operand is dequantized: its product is one of integers, or of weights that stay narrow."""
        value = self._definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr
        while op_name(value) in MOVING or op_name(value) in _DEQUANTIZING:
            if str(getattr(value.args[0].ty, "dtype", "")) in _BYTES:
                return True
            value = self._definitions.get(value.args[0], None) if isinstance(value.args[0], relax.Var) else None
        return op_name(value) == _BLOCKS

    def _ask(self, binding: relax.Binding) -> None:
        """Backward: what a binding reads becomes carried where its result, or its op, wants that."""
        var, value = binding.var, binding.value
        self._store_low(self._stored_sums(var, value))
        if var in self.products:
            self._store_low(value.args[: PRODUCTS[op_name(value)]])  # type: ignore[index]
        elif var not in self.stored_low:
            return
        elif self.is_moved(var):
            self._store_low(_tensors(value))
        elif excluded_call(self._excluded, var, value):
            return
        elif op_name(value) in STORED_ANYWAY or (op_name(value) in NORMS and self._is_read_once(value.args[0])):
            self._store_low(value.args[:1])
        elif isinstance(value, relax.Call) and to_expression(value) is not None:
            self._store_low([arg for arg in value.args if isinstance(arg, relax.Var) and self.is_moved(arg)])

    def _stored_sums(self, var: relax.Var, value: relax.Expr) -> list[relax.Expr]:
        """Products that elementwise work joins, all but the last, which does that work: they are stored for it.

        In the types of `ROUNDED_ON_GPUS`, on GPUs, if nothing else reads them.
        """
        if self._dtype not in ROUNDED_ON_GPUS or op_name(value) not in ELEMENTWISE or not self._where.is_gpu(var):
            return []
        found = {arg: None for arg in value.args if isinstance(arg, relax.Var) and self._follows_product(arg)}
        first = sorted(found, key=lambda arg: self._positions[arg])[:-1]
        return [arg for arg in first if self._readers[arg] == 1]

    def _is_read_once(self, operand: relax.Expr) -> bool:
        """Return whether a norm may have its operand rounded, on a GPU: nothing else reads that."""
        if self._dtype not in ROUNDED_ON_GPUS or not isinstance(operand, relax.Var) or not self._where.is_gpu(operand):
            return False
        return self._readers[operand] == 1 and operand not in self.ends and self._follows_product(operand)

    def _follows_product(self, var: relax.Expr) -> bool:
        """True if a value is what the kernel of a product stores: other elementwise work is done where it is read."""
        value = self._definitions.get(var)
        if value is None or var in self.products:
            return value is not None
        if self._readers[var] > 1 or not (op_name(value) in MOVING or to_expression(value) is not None):
            return False
        return any(self._follows_product(arg) for arg in value.args if isinstance(arg, relax.Var))

    def _follow(self, binding: relax.Binding) -> None:
        """Forward: what is moved of values that all are carried is carried, unless something ends with it."""
        var = binding.var
        if var not in self.ends and self.is_moved(var) and all(map(self.is_rounded, _tensors(binding.value))):
            self._store_low([var])

    def _store_low(self, operands: list[relax.Expr]) -> None:
        for operand in operands:
            if isinstance(operand, relax.Var) and is_wide(operand.ty) and not self._excluded.has(operand.name):
                self.stored_low.add(operand)


def _in_order(expr: relax.Expr) -> Iterator[relax.Binding]:
    """Every binding in program order, those of branches and local functions before the one that holds them."""
    if isinstance(expr, relax.SeqExpr):
        for block in expr.blocks:
            for binding in block.bindings:
                value = binding.value
                for sequence in _inner(value):
                    yield from _in_order(sequence)
                yield binding


def _inside(bindings: list[relax.Binding]) -> list[relax.SeqExpr]:
    return [sequence for binding in bindings for sequence in _inner(binding.value)]


def _inner(value: relax.Expr) -> list[relax.SeqExpr]:
    """The sequences inside a value."""
    if isinstance(value, relax.If):
        return [value.true_branch, value.false_branch]
    return [value.body] if isinstance(value, relax.Function) else []


def _tensors(value: relax.Expr) -> list[relax.Expr]:
    """Tensors of a value, tuples flattened."""
    if isinstance(value, relax.Call):
        return [tensor for arg in value.args for tensor in _tensors(arg)]
    if isinstance(value, relax.Tuple):
        return [tensor for field in value.fields for tensor in _tensors(field)]
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return [value] if isinstance(value, relax.Var) or is_tensor_constant(value) else []
