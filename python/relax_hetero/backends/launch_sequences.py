"""Host code that passes the arguments of all launches of a function in one call.

Before, in the host code of a command buffer, or of a kernel that is called on its own::

    T.call_ffi_kernel("first", x.data, y.data, n, (n + 127) // 128, 128, launch_params=[...])
    T.call_ffi_kernel("second", y.data, z.data, n, (n + 127) // 128, 128, launch_params=[...])

After::

    T.call_packed("sequence main_commands", addresses of x, y, z, n, (n + 127) // 128)

The back end then launches both kernels (`ManagedBackend.sequence_launcher`), and sees when a call repeats another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm_ffi import StructuralKey, structural_map

from ..artifact.device_code import LaunchSequence

SEQUENCE = "sequence "
"""Prefix of the called function's name, which the back end replaces when it knows the text of the kernels."""


def with_sequences(host: tvm.IRModule, kernels: Sequence[str]) -> tuple[tvm.IRModule, tuple[LaunchSequence, ...]]:
    """Host code that calls functions named ``SEQUENCE + name`` in place of launches, and the sequences of these names.

    Functions that do more than launch kernels stay as they are. `host`: host functions, separated from the kernels that
    they launch. `kernels`: names of the kernels.
    """
    sequences: list[LaunchSequence] = []
    functions = dict(host.functions.items())
    for gv, func in functions.items():

        def change(scope: tirx.AttrStmt, name: str = str(gv.name_hint)) -> tirx.AttrStmt:
            replacement = _sequence(name, scope, kernels) if scope.attr_key == "compute_scope" else None
            if replacement is None:
                return scope
            body, sequence = replacement
            sequences.append(sequence)
            return tirx.AttrStmt(scope.node, scope.attr_key, scope.value, body)

        functions[gv] = structural_map(func, (tirx.AttrStmt, change))
    return tvm.IRModule(functions, attrs=host.attrs), tuple(sequences)


def _sequence(name: str, scope: tirx.AttrStmt, kernels: Sequence[str]) -> tuple[tirx.Stmt, LaunchSequence] | None:
    statements = list(scope.body.seq) if isinstance(scope.body, tirx.SeqStmt) else [scope.body]
    launches = [each.value for each in statements if _is_launch(each)]
    others = [each for each in statements if not _is_launch(each)]
    if not launches or not all(isinstance(each, (tirx.Bind, tirx.DeclBuffer)) for each in others):
        return None
    passed: dict[StructuralKey, int] = {}
    constants: dict[float, int] = {}

    def position(argument: tvm.ir.Expr) -> tuple[bool, int]:
        """Return whether an argument is a constant, and its position among those or the passed ones."""
        if isinstance(argument, tirx.IntImm):
            return True, constants.setdefault(int(argument.value), len(constants))
        return False, passed.setdefault(StructuralKey(argument), len(passed))

    positions = [[position(argument) for argument in launch.args[1:]] for launch in launches]
    rows = tuple(
        (kernels.index(str(launch.args[0].value)), *(index + is_constant * len(passed) for is_constant, index in row))
        for launch, row in zip(launches, positions, strict=True)
    )
    call = tirx.call_packed(SEQUENCE + name, *(_number(key.key) for key in passed))
    submission = tirx.Evaluate(call)
    body = tirx.SeqStmt([*others, submission]) if others else submission
    return body, LaunchSequence(name, tuple(constants), rows)


def _number(argument: Any) -> tvm.ir.Expr:
    """An argument; an address as an integer, which costs the interface less than a pointer."""
    is_address = isinstance(argument.ty, tvm.ir.PointerType)
    return tirx.reinterpret("int64", argument) if is_address else argument


def _is_launch(statement: tirx.Stmt) -> bool:
    call = statement.value if isinstance(statement, tirx.Evaluate) else None
    return isinstance(call, tvm.ir.Call) and isinstance(call.op, tvm.ir.Op) and call.op.name == "tirx.call_ffi_kernel"
