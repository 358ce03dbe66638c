"""Names of kernel variants, such as ``matmul_128x768x3072_llvm_0``: one per distinct problem and target."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ..encoding.problem import Dim, MatmulProblem
from ..op.encoded import MATMUL, encoded_op
from ..vdevice import device_name
from .rewriting import relax_functions, walk_bindings

_SHORT = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u"}


class VariantNames:
    """Names by (problem, target), for one module."""

    def __init__(self, mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> None:
        self._taken = {gv.name_hint for gv in mod.get_global_vars()} | _named_already(mod)
        self._names: dict[tuple[MatmulProblem, str], str] = {}
        self._devices: dict[str, str] = {}
        for vdevice in vdevices:
            self._devices.setdefault(str(vdevice.target), device_name(vdevice, vdevices).replace(":", "_"))

    def name(self, problem: MatmulProblem, target: tvm.target.Target) -> str:
        """The variant that solves `problem` on `target`; equal ones share it."""
        key = (problem, str(target))
        if key not in self._names:
            self._names[key] = self._fresh(f"{_describe(problem)}_{self.device(target)}")
        return self._names[key]

    def device(self, target: tvm.target.Target) -> str:
        """The first device of a target, as an identifier."""
        return self._devices.get(str(target), str(target.kind.name))

    def _fresh(self, base: str) -> str:
        name, count = base, 0
        while name in self._taken:
            count += 1
            name = f"{base}_v{count}"
        self._taken.add(name)
        return name


def _describe(problem: MatmulProblem) -> str:
    lhs, rhs = problem.lhs, problem.rhs
    batch = [n for n in dict.fromkeys((*lhs.index_map, *rhs.index_map)) if n.startswith("b")]
    sizes = [lhs.size(n) if n in lhs.index_map else rhs.size(n) for n in batch]
    sizes += [lhs.size("m"), rhs.size("n"), lhs.size("k")]
    types = "" if {lhs.dtype, rhs.dtype} == {"float32"} else f"_{_short(lhs.dtype)}{_short(rhs.dtype)}"
    op = "batch_matmul" if batch else "matmul"
    return f"{op}_{shape_text(sizes)}{types}"


def shape_text(sizes: Sequence[Dim]) -> str:
    """``128x768``, D for a symbolic extent."""
    return "x".join("D" if isinstance(size, str) else str(size) for size in sizes)


def _short(dtype: str) -> str:
    kind = dtype.rstrip("0123456789")
    return _SHORT.get(kind, kind) + dtype[len(kind) :]


def _named_already(mod: tvm.IRModule) -> set[str]:
    calls = [b.value for _, func in relax_functions(mod) for b in walk_bindings(func) if encoded_op(b.value) == MATMUL]
    return {str(call.attrs.kernel) for call in calls} - {""}
