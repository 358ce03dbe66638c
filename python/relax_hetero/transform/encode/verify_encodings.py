"""VerifyEncodings: a module in which a plain op reads an encoded value is refused.

An encoded tensor's type is the logical one, so type inference lets every op take it, and would read bytes in the wrong
order. Encoded values go into encoded ops, as the operand their encoding is of, and through ``to_vdevice``; they do not
leave functions or `If` branches, do not go into tuples, and no kernel takes them.

Before, which raises an EncodingError that names ``relax.exp``, ``a`` and ``main``::

    a = R.hetero.set_encoding(x, "matmul[0]<...>")
    y = R.exp(a)

After, for modules that are right: the very same module.

Assumes nothing: it can stand between any two passes. The module is returned as it is.
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
    """Raise for the first encoded value that something plain consumes.

    Parameters
    ----------
    mod : tvm.IRModule
        Module whose tensors may be encoded.

    Raises
    ------
    EncodingError
        Names the op, the encoded variable, its encoding and the function.
    """
    for gv, func in relax_functions(mod):
        known = encoded_values(func)
        for binding in walk_bindings(func):
            _check_binding(binding, known, gv.name_hint)
        for result in _results(func):
            for var in used_vars(result):
                if var in known:
                    raise EncodingError(
                        f"{_of(var, known[var])} leaves function {gv.name_hint!r} or one of its branches; "
                        "expected unset_encoding before that"
                    )


def _verified(mod: tvm.IRModule) -> tvm.IRModule:
    """The module, once `verify_encodings` has nothing against it.

    Raises
    ------
    EncodingError
        When it runs. Names the op, the encoded variable, its encoding and the function.
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


def _check_binding(binding: relax.Binding, known: dict[relax.Var, EncodedValue], function: str) -> None:
    value = binding.value
    name = encoded_op(value)
    if name is not None:
        _check_encoded_op(name, binding, known, function)
        return
    if isinstance(value, (relax.If, relax.Function, relax.Var)):  # a second name; what branches do is checked there
        return
    if op_name(value) == TRANSFER:
        return
    for var in used_vars(value):
        if var in known:
            raise EncodingError(
                f"op {_consumer(value)} of variable {binding.var.name!r} in function {function!r} consumes "
                f"{_of(var, known[var])}, which only relax.hetero ops and to_vdevice may; "
                "expected unset_encoding before it"
            )


def _check_encoded_op(name: str, binding: relax.Binding, known: dict[relax.Var, EncodedValue], function: str) -> None:
    call = binding.value
    where = f"op {name} of variable {binding.var.name!r} in function {function!r}"
    for index, operand in enumerate(call.args):
        found = known.get(operand) if isinstance(operand, relax.Var) else None
        expected, may_be_plain = _expected(name, call, index)
        if found is None and not may_be_plain:
            raise EncodingError(f"{where}: operand {index} is plain, expected one encoded for {_text(expected)}")
        if found is not None and expected is None:
            raise EncodingError(f"{where}: operand {index} is {_of(operand, found)}, expected a plain tensor")
        if found is not None and expected is not None and not _fits(found, expected):
            raise EncodingError(
                f"{where}: operand {index} is {_of(operand, found)}, expected one encoded for {_text(expected)}"
            )


def _expected(name: str, call: relax.Call, index: int) -> tuple[EncodedValue | None, bool]:
    """Encoding that operand `index` has to have, None for plain; and whether it may be plain as well."""
    own = EncodedValue(Encoding.parse(call.attrs.encoding), layout_of(call))
    if name in (SET, PREPACKED):
        return None, True
    if name in PRODUCTS and index in (LHS, RHS):
        return EncodedValue(own.encoding.of(index), None), False
    if name == RELAYOUT:
        source = call.attrs.from_layout
        return EncodedValue(own.encoding, PackedLayout.parse(source) if source else None), False
    return own, index > 0  # unset_encoding; elementwise and init, where what is plain broadcasts


def _fits(layout: EncodedValue, expected: EncodedValue) -> bool:
    if layout.encoding != expected.encoding:
        return False
    return layout.layout is None or expected.layout is None or layout.layout == expected.layout


def _of(var: relax.Var, value: EncodedValue) -> str:
    return f"variable {var.name!r}, encoded for {_text(value)}"


def _text(value: EncodedValue | None) -> str:
    if value is None:
        return "nothing"
    return str(value.encoding) if value.layout is None else f"{value.encoding} and stored as {value.layout}"


def _consumer(value: relax.Expr) -> str:
    if isinstance(value, relax.Call):
        return op_name(value) or f"call of {getattr(value.op, 'name_hint', value.op)}"
    return type(value).__name__
