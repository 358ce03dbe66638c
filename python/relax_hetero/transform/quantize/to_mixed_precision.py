"""ToMixedPrecision: products in bfloat16, float16 or tfloat32 with sums in float32; everything else stays in float32.

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

What is rounded, and where, says `low_precision_values`; what each op does with what is rounded, `precision_rules`. A
value that is carried in low precision is rounded once, where it is made, and all that reads it reads it rounded: what
works in float32 widens it again, which is exact and no work of its own in a kernel. Only the results of norms,
softmax and reductions are read as they are, but for float16 on GPUs: its ten bits of fraction lose little, and every
tensor that is stored twice costs a kernel more. There, sums that only a norm reads, and a product that another product
adds, are stored rounded, too. Ops that only move elements move rounded ones. Parameters, and what a function returns,
keep their types.

TVM's pass of this name makes float16 only, of what is in dataflow blocks, rounds every product where it is made, before
bias and activation, lets elementwise work follow in float16, and keeps nothing that a user wants kept.

The casts are plain ones: the kernels of products, rows and attention take them in when the module is compiled.

Norms, softmax, reductions and elementwise work stay in float32. So do products of fewer than 8 terms, products of
dequantized integers, and products with weights that the low type cannot hold. Constant weights are rounded here;
weights that `rh.compile` binds, when it binds them. Convolutions are simplified first (`SimplifyConvolutions`), so that
batch norms are folded in single precision.

Activations beyond 65,504 are infinite in float16: keep the ops that make them, or take bfloat16.

With "tfloat32" no type changes: the functions are marked (`module_attrs.WITHOUT_TF32`), and products, attention
and convolutions of float32 tensors on GPUs may then round their operands to 10 bits of fraction, which tensor cores
multiply at several times the rate. CPUs compute as before.

On a device that is known to multiply bfloat16 more slowly than float32, nothing is rounded to bfloat16: a CPU of Intel
with AVX-512 and without AMX, and any with AVX-512 and no instruction for bfloat16 (the table is
`target/product_rates.py`). "auto" takes the fastest type of each device, as long as its error is allowed.

With `devices`, the module is placed first (`RealizeVDevice`), and products on other devices stay as they are: each
device of a module may have a precision of its own, by one run for each. What a rounded product reads from another
device is rounded there, so that half the bytes cross.

Assumes nothing of devices; run it before `rh.compile`. A second run changes nothing.
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

# Which devices' products `ToMixedPrecision` rounds, and which values are on GPUs; the fastest type of a device.

_log = logging.getLogger("relax_hetero")

ERRORS = {WIDE_TYPE: 0.0, TF32: 2e-3, "bfloat16": 1e-2}
"""The largest error of a whole model's result, relative to the largest number in it, that each type was measured to
make (BERT-base and ResNet-50: half of that). Without float16, in which large activations are infinite."""


AUTO = "auto"


@dataclass(frozen=True)
class TypeChoice:
    """An element type, and the devices whose products are rounded to it; None: all, wherever they will be."""

    dtype: str
    devices: tuple[relax.VDevice, ...] | None


def choose_types(
    mod: tvm.IRModule, dtype: str, devices: Sequence[VDeviceSpec] | VDeviceSpec | None, accuracy: float
) -> list[TypeChoice]:
    """Choose the type that each device rounds to: the one asked for, or the fastest of the device.

    It is never bfloat16 on a device that multiplies it more slowly than float32.

    Devices are those of the module; this machine's CPU where it has none, as `rh.compile` has it.

    Raises
    ------
    VDeviceError
        For a device that the module does not have.
    """
    placed = vdevices_of(mod)
    known = placed or [VDevice(native("llvm"))]
    named = devices if isinstance(devices, (list, tuple)) else [devices]
    meant = known if devices is None else [lookup(device, known) for device in named]
    groups: dict[str, list[relax.VDevice]] = {}
    for vdevice in meant:
        chosen = _fastest_type(vdevice, accuracy) if dtype == AUTO else dtype
        if chosen == "bfloat16" and product_rate(vdevice.target, chosen) < 1:
            _log.info(
                "%s multiplies bfloat16 more slowly than float32: ToMixedPrecision rounds nothing there",
                device_name(vdevice, known),
            )
            chosen = WIDE_TYPE
        groups.setdefault(chosen, []).append(vdevice)
    if (devices is None or not placed) and len(groups) == 1:
        return [TypeChoice(chosen, None) for chosen in groups if chosen != WIDE_TYPE]
    return [TypeChoice(chosen, tuple(group)) for chosen, group in groups.items() if chosen != WIDE_TYPE]


def _fastest_type(vdevice: relax.VDevice, accuracy: float) -> str:
    """The element type whose products are fastest on a device, of those whose error is allowed."""
    allowed = [dtype for dtype, error in ERRORS.items() if error <= accuracy]
    return max(allowed, key=lambda dtype: product_rate(vdevice.target, dtype))


class PrecisionDevices:
    """The devices that are meant.

    Parameters
    ----------
    mod : tvm.IRModule
        Placed, where `devices` are named.
    devices : sequence of str, tvm.runtime.Device or VDevice, or one of these, or None
        None: all.

    Raises
    ------
    VDeviceError
        For a device that the module does not have.
    """

    def __init__(self, mod: tvm.IRModule, devices: Sequence[VDeviceSpec] | VDeviceSpec | None) -> None:
        self._all = vdevices_of(mod)
        self._meant: set[int] | None = None
        if devices is not None:
            named = devices if isinstance(devices, (list, tuple)) else [devices]
            self._meant = {vdevice_index(lookup(device, self._all), self._all) for device in named}
        self._only_gpus = bool(self._all) and all("gpu" in vdevice.target.keys for vdevice in self._all)

    def has(self, var: relax.Var) -> bool:
        """Return whether a product with this result is meant."""
        if self._meant is None:
            return True
        vdevice = _vdevice(var)
        return vdevice is not None and vdevice_index(vdevice, self._all) in self._meant

    def is_gpu(self, var: relax.Var) -> bool:
        """Return whether a value is on a GPU: by its type, before placement where no other device is there."""
        vdevice = _vdevice(var)
        return self._only_gpus if vdevice is None else "gpu" in vdevice.target.keys


def _vdevice(var: relax.Var) -> relax.VDevice | None:
    return next((ty.vdevice for ty in tensor_types(var.ty)), None)


# Names of ops, variables and functions that a user wants left alone, checked against a module.

_NEAR_MISSES = 3


class NameFilter:
    """Functions and variables of a module that are kept as they are.

    Parameters
    ----------
    mod : tvm.IRModule
    patterns : sequence of str
        Names of ops (``relax.nn.softmax``, or ``nn.softmax``), of variables, parameters included, and of functions.
        ``*`` stands for any letters; a name that is there letter by letter is meant itself.
    user : str
        Whose argument it is, for messages.

    Raises
    ------
    BuildError
        For what is no sequence of strings, or a pattern that matches nothing; it lists near names.
    """

    def __init__(self, mod: tvm.IRModule, patterns: Sequence[str], user: str) -> None:
        self._matching: set[str] = set()
        if not isinstance(patterns, Iterable):
            raise BuildError(f"{user}: keep is {patterns!r}, expected names of ops, variables and functions")
        found = [patterns] if isinstance(patterns, str) else list(patterns)
        if not found:
            return
        names = _names(mod)
        ops = [name for name in tvm.ir.Op.list_op_names() if name.startswith("relax.")]
        known = {name: name for name in [*ops, *names]} | {name.removeprefix("relax."): name for name in ops}
        for pattern in found:
            if not isinstance(pattern, str):
                raise BuildError(f"{user}: keep has {pattern!r}, expected names of ops, variables and functions")
            matching = [pattern] if pattern in known else [name for name in known if fnmatchcase(name, pattern)]
            if not matching:
                near = difflib.get_close_matches(pattern, known, n=_NEAR_MISSES)
                hint = f"near names: {', '.join(map(repr, near))}" if near else "and no name is near it"
                raise BuildError(f"{user}: keep has {pattern!r}, which names no op, variable or function; {hint}")
            self._matching.update(known[name] for name in matching)

    def has(self, name: str | None) -> bool:
        """Return whether an op, a variable or a function of this name is kept."""
        return name in self._matching


def _names(mod: tvm.IRModule) -> list[str]:
    """Names of functions and variables, in order."""
    names: dict[str, None] = {}
    for gv, func in relax_functions(mod):
        names.update(dict.fromkeys([gv.name_hint, *(param.name for param in func.params)]))
        names.update(dict.fromkeys(binding.var.name for binding in walk_bindings(func)))
    return list(names)


def excluded_call(excluded: NameFilter, var: tvm.ir.Var, value: tvm.ir.Expr) -> bool:
    """Return whether a binding is kept: by the name of its variable, or of its op."""
    return excluded.has(var.name) or excluded.has(op_name(value))


# Which products of a function are computed in low precision, and which values are carried in it.
#
# A value is carried if a product reads it, or an op that only moves elements to where one does. An elementwise op whose
# result is carried wants those of its operands carried that were moved to it, since these are stored; averages and
# resized images want theirs. What comes between two products in one kernel is in no memory and stays as it is.

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


def to_mixed_precision(
    mod: tvm.IRModule,
    dtype: str,
    keep: Sequence[str] = (),
    devices: Sequence[VDeviceSpec] | VDeviceSpec | None = None,
    accuracy: float = ERRORS["bfloat16"],
) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do.

    Parameters
    ----------
    mod : tvm.IRModule
    dtype : str
        "bfloat16", "float16", "tfloat32", or "auto": the fastest of bfloat16, tfloat32 and float32 for each device.
    keep : sequence of str
        Names of ops (``"relax.matmul"``, or ``"matmul"``) and of variables that stay in float32: they are computed in
        float32 and not rounded but for products that read them; and names of functions, which stay as they are. ``*``
        stands for any letters.
    devices : sequence of str, tvm.runtime.Device or VDevice, optional
        Where products are rounded: ``["cuda:0"]``. All devices by default.
    accuracy : float
        Maximum error for "auto", relative to the largest number of a result. bfloat16 is taken from 1e-2 on, tfloat32
        from 2e-3 on: what whole models were measured to lose, doubled.

    Raises
    ------
    BuildError
        For another element type, and a negative accuracy; when it runs, for a name in `keep` that the module does not
        have.
    VDeviceError
        When it runs, for a device that the module does not have.
    PlacementError
        When it runs with `devices` on a module that cannot be placed.
    """
    kept = NameFilter(mod, keep, "ToMixedPrecision")
    choices = choose_types(mod, dtype, devices, accuracy)
    if any(choice.devices is not None for choice in choices):
        mod = realize_vdevice(mod)[0]
    for choice in choices:
        mod = _with_type(mod, choice, kept)
    return mod


def _with_type(mod: tvm.IRModule, choice: TypeChoice, excluded: NameFilter) -> tvm.IRModule:
    """The module with the products of some devices rounded to a type."""
    where = PrecisionDevices(mod, choice.devices)
    mod = simplify_convolutions(mod)
    if choice.dtype == TF32:
        return _with_tf32(mod, excluded, where)
    functions = {gv: func for gv, func in relax_functions(mod) if not excluded.has(gv.name_hint)}
    return with_functions(mod, {gv: _rewritten(func, choice.dtype, excluded, where) for gv, func in functions.items()})


def _check_type(
    dtype: str,
    keep: Sequence[str] = (),
    devices: Sequence[VDeviceSpec] | VDeviceSpec | None = None,
    accuracy: float = ERRORS["bfloat16"],
) -> None:
    known = (*LOW_TYPES, TF32, AUTO)
    if dtype not in known:
        raise BuildError(f"ToMixedPrecision: found element type {dtype!r}, expected one of {known}")
    if not isinstance(accuracy, Real) or isinstance(accuracy, bool) or not accuracy >= 0:
        raise BuildError(f"ToMixedPrecision: found accuracy {accuracy!r}, expected a number that is not negative")


ToMixedPrecision = declare_pass("ToMixedPrecision", to_mixed_precision, _check_type)


def _with_tf32(mod: tvm.IRModule, excluded: NameFilter, where: PrecisionDevices) -> tvm.IRModule:
    """The functions marked with the variables whose products stay exact; those marked already as they are."""
    functions = {}
    for gv, func in relax_functions(mod):
        if not excluded.has(gv.name_hint) and WITHOUT_TF32 not in func.attrs:
            products = [b for b in walk_bindings(func) if op_name(b.value) in PRODUCTS]
            exact = [b.var.name for b in products if excluded_call(excluded, b.var, b.value) or not where.has(b.var)]
            functions[gv] = func.with_attr(WITHOUT_TF32, list(dict.fromkeys(exact)))
    return with_functions(mod, functions)


def _rewritten(func: relax.Function, dtype: str, excluded: NameFilter, where: PrecisionDevices) -> relax.Function:
    low = LowPrecisionValues(func, dtype, excluded, where)
    return with_body(func, _Writer(low, dtype).sequence(func.body)) if low.products else func


class _Writer:
    """Writes one function anew, with the decisions of `LowPrecisionValues`."""

    def __init__(self, low: LowPrecisionValues, dtype: str) -> None:
        self._low, self._dtype = low, dtype
        self._instead: dict[relax.Var, relax.Var] = {}
        """Replacements of variables that exist in low precision only."""
        self._rounded: dict[relax.Var, relax.Var] = {}
        """Variables rounded beside, those of this block and of sequences around it."""
        self._out = Emitter(is_dataflow=False)

    def sequence(self, expr: relax.SeqExpr) -> relax.SeqExpr:
        """A sequence rewritten."""
        out, around = self._out, self._rounded
        blocks = []
        for block in expr.blocks:
            self._out, self._rounded = Emitter(isinstance(block, relax.DataflowBlock)), dict(around)
            for binding in block.bindings:
                self._write(binding)
            blocks.append(type(block)(self._out.bindings, block.span))
        self._out, self._rounded = out, around
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
        then, other = self.sequence(value.true_branch), self.sequence(value.false_branch)
        return typed(relax.If(value.cond, then, other, value.span), value.ty)

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
            value = relax.Call(value.op, args, value.attrs, value.ty_args, value.span)
        elif isinstance(value, relax.TupleGetItem):
            value = relax.TupleGetItem(self._narrow(value.tuple_value), value.index)
        else:
            value = self._narrow(value)
        self._define_low(var, value, with_dtype(var.ty, self._dtype), isinstance(binding, relax.MatchCast))

    def _define_low(self, var: relax.Var, value: relax.Expr, ty: tvm.ir.Type, is_match: bool = False) -> None:
        """Bind what exists in low precision only; where something ends with it, that is widened."""
        new = type(var)(f"{var.name}_{self._dtype}", ty)
        if is_match:
            self._out.bindings.append(relax.MatchCast(new, value, ty))
        else:
            self._out.bind(new, typed(value, ty) if isinstance(value, relax.Call) else value)
        self._instead[var] = new
        if var in self._low.ends:
            self._out.bind(var, self._cast(new, WIDE_TYPE))

    def _narrow(self, expr: relax.Expr) -> relax.Expr:
        """An operand in low precision: rounded once in a block, constants at compile time."""
        if isinstance(expr, relax.Tuple):
            return relax.Tuple([self._narrow(field) for field in expr.fields])
        if is_tensor_constant(expr):
            return self._low.constant(expr)
        if expr in self._instead:
            return self._instead[expr]
        if expr not in self._rounded:
            self._rounded[expr] = self._bound(self._cast(expr, self._dtype), f"{expr.name}_{self._dtype}")
        return self._rounded[expr]

    def _widened(self, value: relax.Expr) -> dict[relax.Var, relax.Expr]:
        """For variables that a value uses: what exists in low precision, widened, for it alone.

        An op reads a value that is carried as all do; what is no op, or knows no numbers, reads what there is.
        """
        names: dict[relax.Var, relax.Expr] = {}
        for var in used_vars(value):
            if var in self._instead or (op_name(value) and self._low.is_rounded(var)):
                low = self._narrow(var)
                names[var] = self._bound(self._cast(low, WIDE_TYPE), f"{var.name}_{WIDE_TYPE}")
        return names

    def _cast(self, var: relax.Var, dtype: str) -> relax.Expr:
        """A tensor, or a tuple of tensors, as another element type."""
        if isinstance(var.ty, relax.TensorType):
            return typed(relax.op.astype(var, dtype), with_dtype(var.ty, dtype))
        items = [
            self._bound(relax.TupleGetItem(var, index), f"{var.name}_{index}") for index in range(len(var.ty.fields))
        ]
        return relax.Tuple([self._bound(self._cast(item, dtype), f"{item.name}_{dtype}") for item in items])

    def _bound(self, value: relax.Expr, name: str) -> relax.Var:
        """A new variable for a value that has its type."""
        var = (relax.DataflowVar if self._out.is_dataflow else relax.Var)(name, value.ty)
        self._out.bind(var, value)
        return var
