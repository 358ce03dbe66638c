"""Translation of a vector expression of TIR into a function in LLVM IR.

TVM's LLVM code generator lacks functions that return vectors, and its simplifier substitutes bound values wherever they
are used. A function in LLVM IR, imported into a module and inlined by LLVM, is written once, however often it is
called, and the simplifier does not see it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import tvm
from tvm import tirx

_TYPES = {"bool": "i1", "int32": "i32", "int64": "i64", "float32": "float", "float64": "double"}
_ARITHMETIC = {tirx.Add: "add", tirx.Sub: "sub", tirx.Mul: "mul", tirx.Div: "div"}
_COMPARISONS = {tirx.LT: "lt", tirx.LE: "le", tirx.GT: "gt", tirx.GE: "ge", tirx.EQ: "eq", tirx.NE: "ne"}
_BITWISE = {
    tirx.BitwiseAnd: "and", tirx.BitwiseOr: "or", tirx.BitwiseXor: "xor", tirx.LShift: "shl", tirx.RShift: "ashr",
    tirx.And: "and", tirx.Or: "or",
}  # fmt: skip
_INTRINSICS = {"tirx.sqrt": "sqrt", "tirx.sin": "sin", "tirx.cos": "cos", "tirx.tan": "tan"}


def llvm_function(name: str, params: Sequence[tirx.Var], result: tirx.Expr) -> str:
    """A function definition.

    `params`: vectors in `result`. `result`: expression of arithmetic, comparisons, selections, conversions, ``Let``,
    sqrt, the C library's sin, cos and tan, and `vector_math.rarely`. Returns the module in LLVM IR with the function
    and its declarations. Raises TypeError if a part of the expression cannot be translated.
    """
    writer = _Writer(params)
    value = writer.value(result)
    signature = ", ".join(f"{_type(param)} {writer.value(param)}" for param in params)
    head = f"define {_type(result)} @{name}({signature}) {{"
    last = f"ret {_type(result)} {value}"
    return "\n".join([*sorted(writer.declarations), head, "entry:", *writer.lines, last, "}", ""])


class _Writer:
    """Instructions in order; the value of a variable is computed once."""

    def __init__(self, params: Sequence[tirx.Var]) -> None:
        self.lines: list[str] = []
        self.declarations: set[str] = set()
        self._block = "entry"
        self._variables = {param: f"%x{i}" for i, param in enumerate(params)}

    def value(self, e: tirx.Expr) -> str:
        """The LLVM IR operand for an expression."""
        while isinstance(e, tirx.Let):
            self._variables[e.var] = self.value(e.value)
            e = e.body
        if isinstance(e, tirx.Var):
            return self._variables[e]
        if isinstance(e, (tirx.Broadcast, tirx.IntImm, tirx.FloatImm)):
            return _constant(e)
        return self._emit(self._instruction(e))

    def _emit(self, instruction: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {instruction}")
        return name

    def _instruction(self, e: tirx.Expr) -> str:
        kind = type(e)
        if kind in _ARITHMETIC:
            # A product and a sum may become one instruction, as in TVM's own code.
            prefix = "f" if _is_float(e) else "s" if kind is tirx.Div else ""
            flag = " contract" if prefix == "f" else ""
            return f"{prefix}{_ARITHMETIC[kind]}{flag} {self._pair(e.a, e.b)}"
        if kind in _COMPARISONS:
            return self._comparison(_COMPARISONS[kind], e.a, e.b)
        if kind in _BITWISE:
            return f"{_BITWISE[kind]} {self._pair(e.a, e.b)}"
        if kind is tirx.Not:
            return f"xor {_type(e)} {self.value(e.a)}, splat (i1 true)"
        if kind is tirx.Select:
            selection = [f"{_type(v)} {self.value(v)}" for v in (e.condition, e.true_value, e.false_value)]
            return f"select {', '.join(selection)}"
        if kind is tirx.Cast:
            return f"{_conversion(e.value, e)} {_type(e.value)} {self.value(e.value)} to {_type(e)}"
        if kind is tvm.ir.Call:
            return self._call(e)
        raise TypeError(f"no translation of {kind.__name__} into LLVM IR: {e}")

    def _pair(self, a: tirx.Expr, b: tirx.Expr) -> str:
        return f"{_type(a)} {self.value(a)}, {self.value(b)}"

    def _comparison(self, relation: str, a: tirx.Expr, b: tirx.Expr) -> str:
        if _is_float(a):
            return f"fcmp {'une' if relation == 'ne' else 'o' + relation} {self._pair(a, b)}"
        return f"icmp {relation if relation in ('eq', 'ne') else 's' + relation} {self._pair(a, b)}"

    def _call(self, call: tvm.ir.Call) -> str:
        name = call.op.name
        if name == "tirx.reinterpret":
            return f"bitcast {_type(call.args[0])} {self.value(call.args[0])} to {_type(call)}"
        if name in _INTRINSICS:
            return self._intrinsic(f"{_INTRINSICS[name]}.v{call.ty.dtype.lanes}f{call.ty.dtype.bits}", call)
        if name == "prim.if_then_else":
            return self._branch(*call.args)
        raise TypeError(f"no translation of {name} into LLVM IR")

    def _intrinsic(self, name: str, call: tvm.ir.Call) -> str:
        ty = _type(call)
        self.declarations.add(f"declare {ty} @llvm.{name}({ty})")
        return f"call {ty} @llvm.{name}({ty} {self.value(call.args[0])})"

    def _branch(self, condition: tirx.Expr, value: tirx.Expr, otherwise: tirx.Expr) -> str:
        """A selection per lane, whose first value is computed only if some lane selects it."""
        common, mask = self.value(otherwise), self.value(condition)
        ty, lanes = _type(otherwise), otherwise.ty.dtype.lanes
        self.declarations.add(f"declare i1 @llvm.vector.reduce.or.v{lanes}i1(<{lanes} x i1>)")
        any_lane = self._emit(f"call i1 @llvm.vector.reduce.or.v{lanes}i1(<{lanes} x i1> {mask})")
        before, rare, after = self._block, f"rare{len(self.lines)}", f"common{len(self.lines)}"
        self.lines += [f"br i1 {any_lane}, label %{rare}, label %{after}", f"{rare}:"]
        self._block = rare
        selection = self._emit(f"select <{lanes} x i1> {mask}, {ty} {self.value(value)}, {ty} {common}")
        self.lines += [f"br label %{after}", f"{after}:"]
        last, self._block = self._block, after
        return f"phi {ty} [ {common}, %{before} ], [ {selection}, %{last} ]"


def _is_float(e: tirx.Expr) -> bool:
    return str(e.ty.dtype).startswith("float")


def _type(e: tirx.Expr) -> str:
    element, _, lanes = str(e.ty.dtype).partition("x")
    return f"<{lanes} x {_TYPES[element]}>" if lanes else _TYPES[element]


def _constant(e: tirx.Expr) -> str:
    scalar = e.value if isinstance(e, tirx.Broadcast) else e
    text = _number(scalar)
    return f"splat ({_type(scalar)} {text})" if isinstance(e, tirx.Broadcast) else text


def _number(scalar: tirx.Expr) -> str:
    if not isinstance(scalar, (tirx.IntImm, tirx.FloatImm)):
        raise TypeError(f"no translation of a broadcast of {type(scalar).__name__} into LLVM IR")
    if isinstance(scalar, tirx.IntImm):
        return str(int(scalar.value))
    value = float(scalar.value)
    if str(scalar.ty.dtype) == "float32":  # LLVM IR writes a float as the equal double
        (value,) = struct.unpack("f", struct.pack("f", value))
    return f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}"


def _conversion(source: tirx.Expr, result: tirx.Expr) -> str:
    if _is_float(source) and _is_float(result):
        return "fpext" if source.ty.dtype.bits < result.ty.dtype.bits else "fptrunc"
    if _is_float(source):
        return "fptosi"
    unsigned = str(source.ty.dtype).startswith("bool")
    if _is_float(result):
        return "uitofp" if unsigned else "sitofp"
    if source.ty.dtype.bits > result.ty.dtype.bits:
        return "trunc"
    return "zext" if unsigned else "sext"
