"""Names of kernel variants, such as ``matmul_128x768x3072_llvm_0``: one per distinct problem and target."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from ...encoding.problem import ConvProblem, Dim, MatmulProblem
from ...op.encoded import PRODUCTS, encoded_op
from ...target.element_types import short_name
from ...target.vdevice import device_name
from ..ir.rewriting import relax_functions, walk_bindings


class VariantNames:
    """Names by (problem, target), for one module."""

    def __init__(self, mod: tvm.IRModule, vdevices: Sequence[relax.VDevice]) -> None:
        self._taken = {gv.name_hint for gv in mod.get_global_vars()} | _named_already(mod)
        self._names: dict[tuple[MatmulProblem | ConvProblem, str], str] = {}
        self._devices: dict[str, str] = {}
        for vdevice in vdevices:
            self._devices.setdefault(str(vdevice.target), device_name(vdevice, vdevices).replace(":", "_"))

    def name(self, problem: MatmulProblem | ConvProblem, target: tvm.target.Target) -> str:
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


def _describe(problem: MatmulProblem | ConvProblem) -> str:
    return _describe_convolution(problem) if isinstance(problem, ConvProblem) else _describe_product(problem)


def _describe_convolution(problem: ConvProblem) -> str:
    """``conv2d_1x64x56x56_128x3x3_s2``: data, output channels and window, then what is not as it mostly is."""
    data, weight, windows = problem.data, problem.weight, problem.windows
    parts = [f"conv{len(windows)}d", shape_text(data.shape), shape_text([weight.shape[0], *weight.shape[2:]])]
    for letter, values in (("s", [w.stride for w in windows]), ("d", [w.dilation for w in windows])):
        if any(value != 1 for value in values):
            parts.append(letter + shape_text(values if len(set(values)) > 1 else values[:1]))
    if problem.groups != 1:
        parts.append(f"g{problem.groups}")
    return "_".join(parts) + _types_text(data.dtype, weight.dtype)


def _describe_product(problem: MatmulProblem) -> str:
    lhs, rhs = problem.lhs, problem.rhs
    batch = [n for n in dict.fromkeys((*lhs.index_map, *rhs.index_map)) if n.startswith("b")]
    sizes = [lhs.size(n) if n in lhs.index_map else rhs.size(n) for n in batch]
    sizes += [lhs.size("m"), rhs.size("n"), lhs.size("k")]
    op = "batch_matmul" if batch else "matmul"
    return f"{op}_{shape_text(sizes)}{_types_text(lhs.dtype, rhs.dtype)}"


def _types_text(lhs: str, rhs: str) -> str:
    return "" if {lhs, rhs} == {"float32"} else f"_{short_name(lhs)}{short_name(rhs)}"


def shape_text(sizes: Sequence[Dim]) -> str:
    """``128x768``, D for a symbolic extent."""
    return "x".join("D" if isinstance(size, str) else str(size) for size in sizes)


def _named_already(mod: tvm.IRModule) -> set[str]:
    values = [binding.value for _, func in relax_functions(mod) for binding in walk_bindings(func)]
    return {str(call.attrs.kernel) for call in values if encoded_op(call) in PRODUCTS} - {""}
