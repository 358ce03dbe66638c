"""ToMixedPrecision: compute products in bfloat16, float16 or tfloat32 with float32 sums, and all other ops in float32.

Before::

    a = R.add(R.matmul(x, w0), b0)                       # w0, w1: constants
    y = R.matmul(R.nn.gelu(a), w1)
    z = R.nn.layer_norm(R.add(y, x), gamma, beta, axes=[-1])

After::

    x_bfloat16 = R.astype(x, "bfloat16")
    a = R.add(R.matmul(x_bfloat16, w0 in bfloat16, out_dtype="float32"), b0)
    g_bfloat16 = R.astype(R.nn.gelu(a), "bfloat16")
    y = R.matmul(g_bfloat16, w1 in bfloat16, out_dtype="float32")
    z = R.nn.layer_norm(R.add(y, x), gamma, beta, axes=[-1])

`LowPrecisionValues` selects the values that are rounded; `precision_rules` has the roles of ops. A value that is stored
in low precision is rounded once, by its producer, and all readers read the rounded value: float32 ops widen it, which
is exact and free inside of a kernel. Only the results of norms, softmax and reductions are also read exactly, except in
float16 on GPUs: its ten bits of fraction lose little, and a tensor that is stored twice takes one more kernel. There,
sums that only a norm reads, and a product that is added to another product, are stored rounded, too. Ops that only move
elements move rounded ones. Parameters and results of functions keep their types.

TVM's pass of this name only supports float16 and dataflow blocks, rounds every product before bias and activation,
computes elementwise ops after it in float16, and lacks exceptions by name.

The casts are plain ops, which the kernels of products, rows and attention fuse when the module is compiled.

Norms, softmax, reductions and elementwise ops stay in float32. So do products of fewer than 8 terms, products of
dequantized integers, and products with weights out of the range of the low type. Constant weights are rounded here,
weights that `rh.compile` binds when it binds them. Convolutions are simplified first (`SimplifyConvolutions`), so that
batch norms are folded in single precision.

Activations beyond 65,504 are infinite in float16: list their ops in `keep`, or use bfloat16.

With "tfloat32" types do not change: the functions get an attribute (`module_attrs.WITHOUT_TF32`), and products,
attention and convolutions of float32 tensors on GPUs may then round their operands to 10 bits of fraction, which tensor
cores multiply at several times the rate. CPUs compute as before.

On devices that are known to multiply bfloat16 more slowly than float32, nothing is rounded to bfloat16: Intel's CPUs
with AVX-512 and without AMX, and all with AVX-512 but without instructions for bfloat16 (`target/product_rates.py`).
"auto" selects the fastest type of each device whose error is allowed.

With `devices`, the module is placed first (`RealizeVDevice`), and products on other devices are not changed: several
runs give each device of a module its own precision. Operands of a rounded product on another device are rounded there,
so that half the bytes are transferred.

Assumes nothing of devices; run it before `rh.compile`. A second run changes nothing. The sections of this file: types
and devices, exceptions by name, the selection of values, and the pass.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from numbers import Real

import tvm
from tvm import relax

from ...errors import BuildError
from ...op.traits import ELEMENTWISE
from ...target.element_types import TF32
from ...target.native_target import native
from ...target.product_rates import product_rate
from ...target.vdevice import VDevice, VDeviceSpec, device_name, lookup, vdevice_index, vdevices_of
from ..ir.blocks import Emitter, renamed, used_vars
from ..ir.declare import declare_pass
from ..ir.module_attrs import WITHOUT_TF32
from ..ir.op_names import CAST
from ..ir.relax_expressions import to_expression
from ..ir.rewriting import (
    handle,
    is_tensor_constant,
    op_name,
    relax_functions,
    tensor_types,
    typed,
    walk_bindings,
    with_args,
    with_body,
    with_functions,
)
from ..placement.realize_vdevice import realize_vdevice
from ..simplify.simplify_convolutions import simplify_convolutions
from .precision_rules import (
    LOW_TYPES,
    MOVING,
    NORMS,
    PRODUCTS,
    READ_EXACTLY,
    ROUNDED_ON_GPUS,
    STORED_ANYWAY,
    WIDE_TYPE,
    is_product,
    is_wide,
    low_constant,
    low_product,
    with_dtype,
)

# Types and devices: the fastest type of a device, and the devices whose products are rounded.

_log = logging.getLogger("relax_hetero")

ERRORS = {WIDE_TYPE: 0.0, TF32: 2e-3, "bfloat16": 1e-2}
"""Maximum error of a model's result with each type, relative to the largest number in it: twice the measured one of
BERT-base and ResNet-50. float16 is missing, because large activations are infinite in it."""


AUTO = "auto"


@dataclass(frozen=True)
class TypeChoice:
    """An element type, and the devices whose products are rounded to it; None: all, also before placement."""

    dtype: str
    devices: tuple[relax.VDevice, ...] | None


def choose_types(
    mod: tvm.IRModule, dtype: str, devices: Sequence[VDeviceSpec] | VDeviceSpec | None, accuracy: float
) -> list[TypeChoice]:
    """Choose the type that each device rounds to: the given one, or the fastest of the device.

    It is never bfloat16 on a device that multiplies it more slowly than float32. The devices are those of the module,
    or this machine's CPU for a module without devices, as in `rh.compile`. Raises VDeviceError for a device that the
    module lacks.
    """
    placed = vdevices_of(mod)
    available = placed or [VDevice(native("llvm"))]
    specs = devices if isinstance(devices, (list, tuple)) else [devices]
    selected = available if devices is None else [lookup(spec, available) for spec in specs]
    groups: dict[str, list[relax.VDevice]] = {}
    for vdevice in selected:
        type_name = _fastest_type(vdevice, accuracy) if dtype == AUTO else dtype
        if type_name == "bfloat16" and product_rate(vdevice.target, type_name) < 1:
            _log.info(
                "%s multiplies bfloat16 more slowly than float32: ToMixedPrecision rounds nothing there",
                device_name(vdevice, available),
            )
            type_name = WIDE_TYPE
        groups.setdefault(type_name, []).append(vdevice)
    if (devices is None or not placed) and len(groups) == 1:
        return [TypeChoice(type_name, None) for type_name in groups if type_name != WIDE_TYPE]
    return [TypeChoice(type_name, tuple(group)) for type_name, group in groups.items() if type_name != WIDE_TYPE]


def _fastest_type(vdevice: relax.VDevice, accuracy: float) -> str:
    """The element type with the fastest products on a device, among those whose error is allowed."""
    allowed = [dtype for dtype, error in ERRORS.items() if error <= accuracy]
    return max(allowed, key=lambda dtype: product_rate(vdevice.target, dtype))


class PrecisionDevices:
    """The devices whose products are rounded.

    `mod`: module, which must be placed if `devices` are given. `devices`: devices; None: all. Raises VDeviceError for a
    device that the module lacks.
    """

    def __init__(self, mod: tvm.IRModule, devices: Sequence[VDeviceSpec] | VDeviceSpec | None) -> None:
        self._all = vdevices_of(mod)
        self._selected: set[int] | None = None
        if devices is not None:
            specs = devices if isinstance(devices, (list, tuple)) else [devices]
            self._selected = {vdevice_index(lookup(spec, self._all), self._all) for spec in specs}
        self._only_gpus = bool(self._all) and all("gpu" in vdevice.target.keys for vdevice in self._all)

    def has(self, var: relax.Var) -> bool:
        """Return whether a product with this result is rounded."""
        if self._selected is None:
            return True
        vdevice = _vdevice(var)
        return vdevice is not None and vdevice_index(vdevice, self._all) in self._selected

    def is_gpu(self, var: relax.Var) -> bool:
        """Return whether a value is on a GPU: by its type, or before placement if the module only has GPUs."""
        vdevice = _vdevice(var)
        return self._only_gpus if vdevice is None else "gpu" in vdevice.target.keys


def _vdevice(var: relax.Var) -> relax.VDevice | None:
    return next((ty.vdevice for ty in tensor_types(var.ty)), None)


# Exceptions by name: ops, variables and functions that are not changed.


class NameFilter:
    """Ops, variables and functions of a module that are not changed.

    `patterns`: names of ops (``relax.nn.softmax``, or ``nn.softmax``), variables (also parameters) and functions. ``*``
    stands for any letters, unless the pattern itself is a name. `user`: function that takes the argument, for messages.
    Raises BuildError if `patterns` is not a sequence of strings, or a pattern matches nothing; the message lists near
    names.
    """

    def __init__(self, mod: tvm.IRModule, patterns: Sequence[str], user: str) -> None:
        self._matching: set[str] = set()
        if not isinstance(patterns, Iterable):
            raise BuildError(f"{user}: keep is {patterns!r}, expected names of ops, variables and functions")
        patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        if not patterns:
            return
        ops = [name for name in tvm.ir.Op.list_op_names() if name.startswith("relax.")]
        names = {name: name for name in [*ops, *_names(mod)]} | {name.removeprefix("relax."): name for name in ops}
        for pattern in patterns:
            if not isinstance(pattern, str):
                raise BuildError(f"{user}: keep has {pattern!r}, expected names of ops, variables and functions")
            matches = [pattern] if pattern in names else [name for name in names if fnmatchcase(name, pattern)]
            if not matches:
                near_names = difflib.get_close_matches(pattern, names)
                hint = f"near names: {', '.join(map(repr, near_names))}" if near_names else "and no name is near it"
                raise BuildError(f"{user}: keep has {pattern!r}, which names no op, variable or function; {hint}")
            self._matching.update(names[name] for name in matches)

    def has(self, name: str | None) -> bool:
        """Return whether the op, variable or function of this name is not changed."""
        return name in self._matching


def _names(mod: tvm.IRModule) -> list[str]:
    """Names of functions and variables, in order."""
    names: dict[str, None] = {}
    for gv, func in relax_functions(mod):
        names.update(dict.fromkeys([gv.name_hint, *(param.name for param in func.params)]))
        names.update(dict.fromkeys(binding.var.name for binding in walk_bindings(func)))
    return list(names)


def excluded_call(excluded: NameFilter, var: tvm.ir.Var, value: tvm.ir.Expr) -> bool:
    """Return whether a binding is not changed, by the name of its variable or op."""
    return excluded.has(var.name) or excluded.has(op_name(value))


# Selection of the products of a function that are computed in low precision, and of the values that are stored in it.
#
# A value is stored in low precision if a product reads it, perhaps after ops that only move elements. If the result of
# an elementwise op is, so are its operands that are results of moving ops, since these are stored; and so are the
# operands of averages and resized images. Values inside a kernel, between two products, are not stored and not rounded.

_DEQUANTIZING = ("relax.multiply", "relax.divide", "relax.subtract", CAST)
_BYTES = ("int8", "uint8")
_DEQUANTIZE_BLOCKS = "relax.hetero.dequantize_blocks"


class LowPrecisionValues:
    """Selected products and values of one function."""

    def __init__(
        self,
        func: relax.Function,
        dtype: str,  # low type
        excluded: NameFilter,  # ops, variables and functions that are not changed
        devices: PrecisionDevices,  # devices whose products are rounded
    ) -> None:
        # Values that exist in low precision and are read in it, except for ops in `READ_EXACTLY`.
        self.stored_low: set[relax.Var] = set()
        self.products: set[relax.Var] = set()  # results of products in low precision
        rounded = cache(lambda key: low_constant(self._constants[key], dtype))
        self._constants: dict[int, tvm.ir.GenericConst] = {}
        self._rounded: Callable[[int], tvm.ir.GenericConst | None] = rounded
        self._excluded, self._devices, self._dtype = excluded, devices, dtype
        self._bindings = list(_in_order(func.body))
        self._definitions = {binding.var: binding.value for binding in self._bindings}
        self._positions = {binding.var: position for position, binding in enumerate(self._bindings)}
        # Results of the function, its branches and local functions, which keep their types.
        self.ends = {var for sequence in [func.body, *_inside(self._bindings)] for var in used_vars(sequence.body)}
        self._readers = Counter(var for binding in self._bindings for var in used_vars(binding.value))
        self._find_products()
        for binding in reversed(self._bindings):
            self._store_operands(binding)
        for binding in self._bindings:
            self._store_moved(binding)

    def constant(self, constant: tvm.ir.GenericConst) -> tvm.ir.GenericConst | None:
        """A rounded constant; None if it has a number out of the range of the low type."""
        key = handle(constant)
        self._constants[key] = constant
        return self._rounded(key)

    def is_moved(self, var: relax.Var) -> bool:
        """Return whether a value is made of elements of other values, so that rounding commutes with its op."""
        value = self._definitions.get(var)
        if value is None or not is_wide(var.ty) or excluded_call(self._excluded, var, value):
            return False
        if isinstance(value, relax.TupleGetItem):
            return isinstance(value.tuple_value, relax.Var) and self.is_moved(value.tuple_value)
        if isinstance(value, relax.Var):
            return True
        return isinstance(value, relax.Tuple) or op_name(value) in MOVING

    def is_rounded(self, var: relax.Var) -> bool:
        """True if all readers of a value read it rounded: it is stored so, defined here, and not read exactly."""
        if var not in self.stored_low or var not in self._definitions:
            return False
        if op_name(self._definitions[var]) not in READ_EXACTLY:
            return True
        return self._dtype in ROUNDED_ON_GPUS and self._devices.is_gpu(var)

    def _find_products(self) -> None:
        """Select, forward, products whose operands are in the range of the low type and not dequantized."""
        out_of_range: set[relax.Var] = set()
        for binding in self._bindings:
            var, value = binding.var, binding.value
            name = op_name(value)
            if name not in PRODUCTS and not self.is_moved(var):
                continue
            if any(arg in out_of_range or self._is_out_of_range(arg) for arg in _tensors(value)):
                out_of_range.add(var)
            elif name in PRODUCTS and is_product(value) and self._may_change(var, value):
                if not any(self._is_dequantized(arg) for arg in value.args):
                    self.products.add(var)

    def _may_change(self, var: relax.Var, value: relax.Expr) -> bool:
        """Return whether the pass may change a call, by its device and name."""
        return self._devices.has(var) and not excluded_call(self._excluded, var, value)

    def _is_out_of_range(self, expr: relax.Expr) -> bool:
        return is_tensor_constant(expr) and is_wide(expr.ty) and self.constant(expr) is None

    def _is_dequantized(self, expr: relax.Expr) -> bool:
        """Return whether an operand is dequantized, so that the product is one of integers or quantized weights."""
        value = self._definitions.get(expr, expr) if isinstance(expr, relax.Var) else expr
        while op_name(value) in MOVING or op_name(value) in _DEQUANTIZING:
            if str(getattr(value.args[0].ty, "dtype", "")) in _BYTES:
                return True
            value = self._definitions.get(value.args[0], None) if isinstance(value.args[0], relax.Var) else None
        return op_name(value) == _DEQUANTIZE_BLOCKS

    def _store_operands(self, binding: relax.Binding) -> None:
        """Store, backward, operands of a binding in low precision if its result or its op requires it."""
        var, value = binding.var, binding.value
        self._store_low(self._added_products(var, value))
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

    def _added_products(self, var: relax.Var, value: relax.Expr) -> list[relax.Expr]:
        """Operands of an elementwise op that follow products, except the last, whose kernel computes the op.

        They are stored for it, and rounded on GPUs in the types of `ROUNDED_ON_GPUS` if they have no other reader.
        """
        if self._dtype not in ROUNDED_ON_GPUS or op_name(value) not in ELEMENTWISE or not self._devices.is_gpu(var):
            return []
        results = {arg: None for arg in value.args if isinstance(arg, relax.Var) and self._follows_product(arg)}
        stored = sorted(results, key=lambda arg: self._positions[arg])[:-1]
        return [arg for arg in stored if self._readers[arg] == 1]

    def _is_read_once(self, operand: relax.Expr) -> bool:
        """Return whether a norm on a GPU may read its operand rounded, because it is the only reader."""
        if (
            self._dtype not in ROUNDED_ON_GPUS
            or not isinstance(operand, relax.Var)
            or not self._devices.is_gpu(operand)
        ):
            return False
        return self._readers[operand] == 1 and operand not in self.ends and self._follows_product(operand)

    def _follows_product(self, var: relax.Expr) -> bool:
        """True if the kernel of a product stores a value; other elementwise ops are fused into their reader."""
        value = self._definitions.get(var)
        if value is None or var in self.products:
            return value is not None
        if self._readers[var] > 1 or not (op_name(value) in MOVING or to_expression(value) is not None):
            return False
        return any(self._follows_product(arg) for arg in value.args if isinstance(arg, relax.Var))

    def _store_moved(self, binding: relax.Binding) -> None:
        """Store, forward, the result of a moving op in low precision if all its operands are, unless it is a result."""
        var = binding.var
        if var not in self.ends and self.is_moved(var) and all(map(self.is_rounded, _tensors(binding.value))):
            self._store_low([var])

    def _store_low(self, operands: list[relax.Expr]) -> None:
        for operand in operands:
            if isinstance(operand, relax.Var) and is_wide(operand.ty) and not self._excluded.has(operand.name):
                self.stored_low.add(operand)


def _in_order(expr: relax.Expr) -> Iterator[relax.Binding]:
    """All bindings in program order, those of branches and local functions before the enclosing one."""
    if isinstance(expr, relax.SeqExpr):
        for block in expr.blocks:
            for binding in block.bindings:
                for sequence in _inner(binding.value):
                    yield from _in_order(sequence)
                yield binding


def _inside(bindings: list[relax.Binding]) -> list[relax.SeqExpr]:
    return [sequence for binding in bindings for sequence in _inner(binding.value)]


def _inner(value: relax.Expr) -> list[relax.SeqExpr]:
    """Sequences inside a value."""
    if isinstance(value, relax.If):
        return [value.true_branch, value.false_branch]
    return [value.body] if isinstance(value, relax.Function) else []


def _tensors(value: relax.Expr) -> list[relax.Expr]:
    """Tensors of a value, with tuples flattened."""
    if isinstance(value, relax.Call):
        return [tensor for arg in value.args for tensor in _tensors(arg)]
    if isinstance(value, relax.Tuple):
        return [tensor for field in value.fields for tensor in _tensors(field)]
    if isinstance(value, relax.TupleGetItem):
        return [value.tuple_value]
    return [value] if isinstance(value, relax.Var) or is_tensor_constant(value) else []


def to_mixed_precision(
    mod: tvm.IRModule,
    dtype: str,
    keep: Sequence[str] = (),
    devices: Sequence[VDeviceSpec] | VDeviceSpec | None = None,
    accuracy: float = ERRORS["bfloat16"],
) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes.

    Parameters
    ----------
    mod : tvm.IRModule
    dtype : str
        "bfloat16", "float16", "tfloat32", or "auto": the fastest of bfloat16, tfloat32 and float32 for each device.
    keep : sequence of str
        Names of ops (``"relax.matmul"``, or ``"matmul"``) and variables that are computed in float32, and only rounded
        for products that read them; and names of functions that are not changed. ``*`` stands for any letters.
    devices : sequence of str, tvm.runtime.Device or VDevice, optional
        Devices whose products are rounded: ``["cuda:0"]``. All devices by default.
    accuracy : float
        Maximum error for "auto", relative to the largest number of a result. It allows bfloat16 from 1e-2 on, tfloat32
        from 2e-3 on: twice the measured errors of models.

    Raises
    ------
    BuildError
        For an unknown element type, and a negative accuracy; when it runs, for a name in `keep` that the module lacks.
    VDeviceError
        When it runs, for a device that the module lacks.
    PlacementError
        When it runs with `devices` on a module that cannot be placed.
    """
    excluded = NameFilter(mod, keep, "ToMixedPrecision")
    choices = choose_types(mod, dtype, devices, accuracy)
    if any(choice.devices is not None for choice in choices):
        mod = realize_vdevice(mod)[0]
    for choice in choices:
        mod = _with_type(mod, choice, excluded)
    return mod


def _with_type(mod: tvm.IRModule, choice: TypeChoice, excluded: NameFilter) -> tvm.IRModule:
    """The module with the products of a choice's devices rounded to its type."""
    devices = PrecisionDevices(mod, choice.devices)
    mod = simplify_convolutions(mod)
    if choice.dtype == TF32:
        return _with_tf32(mod, excluded, devices)
    functions = {gv: func for gv, func in relax_functions(mod) if not excluded.has(gv.name_hint)}
    return with_functions(
        mod, {gv: _rewritten(func, choice.dtype, excluded, devices) for gv, func in functions.items()}
    )


def _check_type(
    dtype: str,
    keep: Sequence[str] = (),
    devices: Sequence[VDeviceSpec] | VDeviceSpec | None = None,
    accuracy: float = ERRORS["bfloat16"],
) -> None:
    dtypes = (*LOW_TYPES, TF32, AUTO)
    if dtype not in dtypes:
        raise BuildError(f"ToMixedPrecision: found element type {dtype!r}, expected one of {dtypes}")
    if not isinstance(accuracy, Real) or isinstance(accuracy, bool) or not accuracy >= 0:
        raise BuildError(f"ToMixedPrecision: found accuracy {accuracy!r}, expected a number that is not negative")


ToMixedPrecision = declare_pass("ToMixedPrecision", to_mixed_precision, _check_type)


def _with_tf32(mod: tvm.IRModule, excluded: NameFilter, devices: PrecisionDevices) -> tvm.IRModule:
    """Functions with an attribute that names the products that stay exact; functions with the attribute are kept."""
    functions = {}
    for gv, func in relax_functions(mod):
        if not excluded.has(gv.name_hint) and WITHOUT_TF32 not in func.attrs:
            products = [b for b in walk_bindings(func) if op_name(b.value) in PRODUCTS]
            exact = [b.var.name for b in products if excluded_call(excluded, b.var, b.value) or not devices.has(b.var)]
            functions[gv] = func.with_attr(WITHOUT_TF32, list(dict.fromkeys(exact)))
    return with_functions(mod, functions)


def _rewritten(func: relax.Function, dtype: str, excluded: NameFilter, devices: PrecisionDevices) -> relax.Function:
    low = LowPrecisionValues(func, dtype, excluded, devices)
    return with_body(func, _Writer(low, dtype).sequence(func.body)) if low.products else func


class _Writer:
    """Writer of one function with the selection of `LowPrecisionValues`."""

    def __init__(self, low: LowPrecisionValues, dtype: str) -> None:
        self._low, self._dtype = low, dtype
        self._replacements: dict[relax.Var, relax.Var] = {}
        """Replacements of variables that exist in low precision only."""
        self._rounded: dict[relax.Var, relax.Var] = {}
        """Additional rounded variables of this block and of the enclosing sequences."""
        self._out = Emitter(is_dataflow=False)

    def sequence(self, expr: relax.SeqExpr) -> relax.SeqExpr:
        """Rewrite a sequence."""
        out, enclosing = self._out, self._rounded
        blocks = []
        for block in expr.blocks:
            self._out, self._rounded = Emitter(isinstance(block, relax.DataflowBlock)), dict(enclosing)
            for binding in block.bindings:
                self._write(binding)
            blocks.append(type(block)(self._out.bindings, block.span))
        self._out, self._rounded = out, enclosing
        return typed(relax.SeqExpr(blocks, expr.body, expr.span), expr.ty)

    def _write(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        if var in self._low.products:
            self._write_product(var, value)
        elif var in self._low.stored_low and self._low.is_moved(var):
            self._write_moved(binding)
        elif isinstance(value, (relax.If, relax.Function)):
            self._out.bindings.append(relax.VarBinding(var, self._nested(value), binding.span))
        else:
            self._out.bindings.append(renamed(binding, self._widened(value)))
            if var in self._low.stored_low and isinstance(var.ty, relax.TensorType):
                self._narrow(var)

    def _nested(self, value: relax.If | relax.Function) -> relax.Expr:
        if isinstance(value, relax.Function):
            return with_body(value, self.sequence(value.body))
        branches = [self.sequence(branch) for branch in (value.true_branch, value.false_branch)]
        return typed(relax.If(value.cond, *branches, value.span), value.ty)

    def _write_product(self, var: relax.Var, call: relax.Call) -> None:
        count = PRODUCTS[op_name(call) or ""]
        names = self._widened(relax.Tuple(call.args[count:]))
        rest = [names.get(arg, arg) if isinstance(arg, relax.Var) else arg for arg in call.args[count:]]
        product, ty = low_product(call, [*map(self._narrow, call.args[:count]), *rest], self._dtype)
        if not is_wide(ty):
            self._define_low(var, product, ty)
            return
        self._out.bind(var, typed(product, ty))
        if var in self._low.stored_low:
            self._narrow(var)

    def _write_moved(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        if isinstance(value, relax.Call):
            args = [self._narrow(arg) if is_wide(arg.ty) else arg for arg in value.args]
            value = with_args(value, args)
        elif isinstance(value, relax.TupleGetItem):
            value = relax.TupleGetItem(self._narrow(value.tuple_value), value.index)
        else:
            value = self._narrow(value)
        self._define_low(var, value, with_dtype(var.ty, self._dtype), isinstance(binding, relax.MatchCast))

    def _define_low(self, var: relax.Var, value: relax.Expr, ty: tvm.ir.Type, is_match: bool = False) -> None:
        """Bind a value that only exists in low precision; a result of the function is widened again."""
        new = type(var)(f"{var.name}_{self._dtype}", ty)
        if is_match:
            self._out.bindings.append(relax.MatchCast(new, value, ty))
        else:
            self._out.bind(new, typed(value, ty) if isinstance(value, relax.Call) else value)
        self._replacements[var] = new
        if var in self._low.ends:
            self._out.bind(var, self._cast(new, WIDE_TYPE))

    def _narrow(self, expr: relax.Expr) -> relax.Expr:
        """An operand in low precision: variables are rounded once for each block, constants at compile time."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._narrow(field) for field in expr.fields])
        if is_tensor_constant(expr):
            return self._low.constant(expr)
        if expr in self._replacements:
            return self._replacements[expr]
        if expr not in self._rounded:
            self._rounded[expr] = self._emit(self._cast(expr, self._dtype), f"{expr.name}_{self._dtype}")
        return self._rounded[expr]

    def _widened(self, value: relax.Expr) -> dict[relax.Var, relax.Expr]:
        """Widened replacements, for this value alone, of its variables that are read in low precision.

        Ops read rounded values; other values (tuples, branches) keep variables that exist in both precisions.
        """
        names: dict[relax.Var, relax.Expr] = {}
        for var in used_vars(value):
            if var in self._replacements or (op_name(value) and self._low.is_rounded(var)):
                names[var] = self._emit(self._cast(self._narrow(var), WIDE_TYPE), f"{var.name}_{WIDE_TYPE}")
        return names

    def _cast(self, var: relax.Var, dtype: str) -> relax.Expr:
        """A tensor, or a tuple of tensors, cast to another element type."""
        if isinstance(var.ty, relax.TensorType):
            return typed(relax.op.astype(var, dtype), with_dtype(var.ty, dtype))
        items = [
            self._emit(relax.TupleGetItem(var, index), f"{var.name}_{index}") for index in range(len(var.ty.fields))
        ]
        return relax.Tuple([self._emit(self._cast(item, dtype), f"{item.name}_{dtype}") for item in items])

    def _emit(self, value: relax.Expr, name: str) -> relax.Var:
        """Bind a value with a type to a new variable."""
        var = self._out.new_var(name, value.ty)
        self._out.bind(var, value)
        return var
