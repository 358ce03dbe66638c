"""VerifyEncodings: refuse a module in which a plain op reads an encoded value.

An encoded tensor has its logical type, so type inference accepts it in every op, which would then read elements in the
wrong order. Encoded values may be operands of encoded ops, according to their encoding, and of ``to_vdevice``; they may
not leave functions or `If` branches, be fields of tuples or arguments of kernels.

Before, which raises an EncodingError that names ``relax.exp``, ``a`` and ``main``::

    a = R.hetero.set_encoding(x, "matmul[0]<...>")
    y = R.exp(a)

After, for correct modules: the same module.

Assumes nothing: it can run between any two passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import tvm
from tvm import relax

from ...encoding.encoding import LHS, RHS, Encoding
from ...encoding.packed_layout import PackedLayout
from ...errors import EncodingError
from ...op.encoded import PREPACKED, PRODUCTS, RELAYOUT, SET, encoded_op
from ..ir.blocks import used_vars
from ..ir.declare import declare_pass
from ..ir.op_names import TRANSFER
from ..ir.rewriting import op_name, relax_functions, walk_bindings
from .encoded_values import EncodedValue, encoded_values, layout_of


def verify_encodings(mod: tvm.IRModule) -> None:
    """Raise for the first encoded value that a plain op consumes.

    Parameters
    ----------
    mod : tvm.IRModule
        Module whose tensors may be encoded.

    Raises
    ------
    EncodingError
        If an encoded value is misused; the message names the op, the variable, its encoding and the function.
    """
    for gv, func in relax_functions(mod):
        encoded = encoded_values(func)
        for binding in walk_bindings(func):
            _check_binding(binding, encoded, gv.name_hint)
        for result in _results(func):
            for var in used_vars(result):
                if var in encoded:
                    raise EncodingError(
                        f"{_describe(var, encoded[var])} leaves function {gv.name_hint!r} or one of its branches; "
                        "expected unset_encoding before that"
                    )


def _verified(mod: tvm.IRModule) -> tvm.IRModule:
    """Check the module by `verify_encodings`, and return it.

    Raises
    ------
    EncodingError
        When it runs: an encoded value is misused; the message names op, variable, encoding and function.
    """
    verify_encodings(mod)
    return mod


VerifyEncodings = declare_pass("VerifyEncodings", _verified)


def _results(func: relax.Function) -> Iterator[relax.Expr]:
    """Values that the function, its branches and local functions evaluate to."""
    pending: list[relax.Expr] = [func.body]
    while pending:
        expr = pending.pop()
        if not isinstance(expr, relax.SeqExpr):
            yield expr
            continue
        yield expr.body
        for binding in walk_bindings(expr, nested=False):
            if isinstance(binding.value, relax.If):
                pending += [binding.value.true_branch, binding.value.false_branch]
            elif isinstance(binding.value, relax.Function):
                pending.append(binding.value.body)


def _check_binding(binding: relax.Binding, encoded: dict[relax.Var, EncodedValue], function: str) -> None:
    value = binding.value
    name = encoded_op(value)
    if name is not None:
        _check_encoded_op(name, binding, encoded, function)
        return
    if isinstance(value, (relax.If, relax.Function, relax.Var)):  # an alias, or bindings that are checked themselves
        return
    if op_name(value) == TRANSFER:
        return
    for var in used_vars(value):
        if var in encoded:
            raise EncodingError(
                f"op {_consumer(value)} of variable {binding.var.name!r} in function {function!r} consumes "
                f"{_describe(var, encoded[var])}, which only relax.hetero ops and to_vdevice may; "
                "expected unset_encoding before it"
            )


def _check_encoded_op(name: str, binding: relax.Binding, encoded: dict[relax.Var, EncodedValue], function: str) -> None:
    call = binding.value
    subject = f"op {name} of variable {binding.var.name!r} in function {function!r}"
    for index, operand in enumerate(call.args):
        actual = encoded.get(operand) if isinstance(operand, relax.Var) else None
        expected, may_be_plain = _expected(name, call, index)
        if actual is None and not may_be_plain:
            raise EncodingError(f"{subject}: operand {index} is plain, expected encoding {_text(expected)}")
        if actual is not None and expected is None:
            raise EncodingError(f"{subject}: operand {index} is {_describe(operand, actual)}, expected a plain tensor")
        if actual is not None and expected is not None and not _fits(actual, expected):
            raise EncodingError(
                f"{subject}: operand {index} is {_describe(operand, actual)}, expected encoding {_text(expected)}"
            )


def _expected(name: str, call: relax.Call, index: int) -> tuple[EncodedValue | None, bool]:
    """Required encoding of operand `index` (None: plain), and whether the operand may be plain as well."""
    result = EncodedValue(Encoding.parse(call.attrs.encoding), layout_of(call))
    if name in (SET, PREPACKED):
        return None, True
    if name in PRODUCTS and index in (LHS, RHS):
        return EncodedValue(result.encoding.of(index), None), False
    if name == RELAYOUT:
        source = call.attrs.from_layout
        return EncodedValue(result.encoding, PackedLayout.parse(source) if source else None), False
    return result, index > 0  # unset_encoding; elementwise and init, where plain operands broadcast


def _fits(value: EncodedValue, expected: EncodedValue) -> bool:
    if value.encoding != expected.encoding:
        return False
    return value.layout is None or expected.layout is None or value.layout == expected.layout


def _describe(var: relax.Var, value: EncodedValue) -> str:
    return f"variable {var.name!r}, encoded for {_text(value)}"


def _text(value: EncodedValue | None) -> str:
    if value is None:
        return "nothing"
    return str(value.encoding) if value.layout is None else f"{value.encoding} and stored as {value.layout}"


def _consumer(value: relax.Expr) -> str:
    if isinstance(value, relax.Call):
        return op_name(value) or f"call of {getattr(value.op, 'name_hint', value.op)}"
    return type(value).__name__
