"""Count the instructions of the main loops of products for AArch64: a machine without such a CPU cannot time them.

    python apps/bench/arm_loops.py                                   # this library's, for several CPUs
    python apps/bench/arm_loops.py libopenblas.so.0 'sgemm_kernel_'  # of functions of a library or an object file

The main loop of a function is the innermost loop with the most multiply-adds. Libraries need aarch64-linux-gnu-objdump
(binutils-aarch64-linux-gnu on Debian and Ubuntu).
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PRODUCTS = re.compile(r"fml[as]l?[2bt]?|mla|[su]ml[as]l2?[bt]?|[su]dot|s?us?dot|[us]?s?u?mmla|bf(mmla|dot|mlal[bt])")

F32, BF16 = ("float32",) * 3, ("bfloat16", "bfloat16", "float32")
F16, S8, U8 = ("float16", "float16", "float32"), ("int8", "int8", "int32"), ("uint8", "int8", "int32")
CPUS = {
    "neoverse-n1": (F32, F16, BF16, S8),
    "neoverse-v2": (F32, F16, BF16, S8),
    "neoverse-v1": (F32, F16, BF16, S8),
    "fujitsu-monaka": (F32, F16, BF16, S8),
    "a64fx": (F32, F16, BF16, S8),
}


@dataclass(frozen=True)
class Loop:
    """Counts of a loop's instructions: all, and multiply-adds."""

    instructions: int
    products: int

    def __str__(self) -> str:
        share = self.products / self.instructions
        return f"{self.products:4} of {self.instructions:4} instructions multiply and add: {share:.0%}"


def main_loop(lines: list[tuple[str, str]]) -> Loop | None:
    """The innermost loop with the most multiply-adds; lines are labels (or "") and instructions."""
    index = {label: number for number, (label, _) in enumerate(lines) if label}
    ends = [
        (index[jump[1]], number)
        for number, (_, code) in enumerate(lines)
        if (jump := re.search(r"^(?:b|cbn?z|tbn?z)\S*\s.*?(\.?\w+)$", code))
        and index.get(jump[1], number + 1) <= number
    ]
    inner = [(a, b) for a, b in ends if not any((c, d) != (a, b) and a <= c and d <= b for c, d in ends)]
    loops = [
        Loop(b - a + 1, sum(bool(PRODUCTS.fullmatch(code.split()[0])) for _, code in lines[a : b + 1]))
        for a, b in inner
    ]
    return max(loops, key=lambda loop: loop.products, default=None)


def functions_of(file: str, pattern: str) -> Iterator[tuple[str, Loop]]:
    """The main loops of a file's functions whose names match."""
    command = ["aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", file]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name, body in re.findall(r"^[0-9a-f]+ <(\S+)>:\n((?:.+\n)*)", text, re.MULTILINE):
        if re.search(pattern, name):
            lines = re.findall(r"^\s*([0-9a-f]+):\t(.*?)(?:\s*(?:<.*|//.*))?$", body, re.MULTILINE)
            loop = main_loop([(address, code.strip()) for address, code in lines])
            if loop is not None and loop.products:
                yield name, loop


def target_of(mcpu: str) -> Any:
    """The target of a CPU."""
    import tvm

    return tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 2})


def our_loop(mcpu: str, problem: Any) -> Loop | None:
    """The main loop of this library's kernel for a problem."""
    import tvm

    import relax_hetero as rh

    target = target_of(mcpu)
    function = rh.encoding.resolver_for(target).kernel(problem, target).with_attr("global_symbol", "kernel")
    module = tvm.compile(tvm.IRModule({"kernel": function}), target=target)
    lines: list[tuple[str, str]] = []
    label = ""
    for line in module.mod.inspect_source("asm").splitlines():
        code = re.split("//", line)[0].strip()
        if start := re.fullmatch(r"(\.L\w+):", code):
            # Labels of debug information follow those of blocks.
            label = label if start[1].startswith(".Ltmp") and label else start[1]
        elif code and not code.startswith(".") and not code.endswith(":"):
            lines.append((label, code))
            label = ""
    return main_loop(lines)


def product(mcpu: str, types: tuple[str, str, str], shape: tuple[int, int, int] = (256, 512, 512)) -> Any:
    """A matrix product, with the right operand packed for the CPU."""
    from relax_hetero.encoding.encoding import Encoding
    from relax_hetero.encoding.problem import MatmulProblem

    maps, sizes = (("m", "k"), ("k", "n"), ("m", "n")), dict(zip("mkn", shape, strict=True))
    operands = _operands(mcpu, lambda index: Encoding("matmul", index, types, maps, tuple(sizes.items())), sizes)
    return MatmulProblem(*operands, types[2])


def convolution(mcpu: str, types: tuple[str, str, str]) -> Any:
    """A convolution of 64 by 64 channels, 28 by 28 pixels and windows of 3 by 3, channels last."""
    from relax_hetero.encoding.encoding import CONVOLUTIONS, ConvAttrs, Encoding, conv_maps
    from relax_hetero.encoding.problem import ConvProblem, Window

    maps = conv_maps(2)
    sizes = {"b": 1, "c": 64, "n": 64, "k": 64, **dict.fromkeys(("x0", "x1", "y0", "y1"), 28), "w0": 3, "w1": 3}
    attrs = ConvAttrs((1, 1), (1,) * 4, (1, 1))

    def encoding(index: int) -> Encoding:
        return Encoding(CONVOLUTIONS[1], index, types, maps, tuple(sizes.items()), attrs, "exact")

    operands = _operands(mcpu, encoding, sizes)
    return ConvProblem(*operands, types[2], (Window(3, before=1, after=1),) * 2)


def _operands(mcpu: str, encoding: Callable[[int], Any], sizes: dict[str, int]) -> list[Any]:
    import relax_hetero as rh
    from relax_hetero.encoding.encoding import LHS, RESULT, RHS
    from relax_hetero.encoding.packed_layout import PackedLayout
    from relax_hetero.encoding.problem import Operand

    target, operands = target_of(mcpu), []
    for index in (LHS, RHS, RESULT):
        one = encoding(index)
        is_image, names = one.conv is not None and index != RHS, one.index_maps[index]
        layout = rh.encoding.resolver_for(target).resolve(one, target)
        if is_image:
            layout = PackedLayout((0, 2, 3, 1))
        operands.append(Operand(tuple(sizes[name] for name in names), one.element_types[index], names, layout))
    return operands


def attention(mcpu: str) -> Any:
    """Attention of 12 heads of 128 queries and keys by 64."""
    from relax_hetero.encoding.expression import Expression
    from relax_hetero.encoding.packed_layout import PackedLayout
    from relax_hetero.encoding.problem import AttentionProblem, Epilogue, Operand

    maps = ("b m h*d", "b n g*d", "b n g*e", "b m h*e")
    operands = [Operand((1, 128, 768), "float32", tuple(m.split()), PackedLayout.identity(3)) for m in maps]
    sizes = tuple({"b": 1, "h": 12, "g": 12, "m": 128, "n": 128, "d": 64, "e": 64}.items())
    return AttentionProblem(*operands, ((0,) * 3,) * 3, sizes, Epilogue(Expression.parse("multiply(x0, 0.125)"), ()))


def four_bits(mcpu: str, rows: int, activation_bits: int) -> Any:
    """Rows by 512 columns of q4_0, 512 deep."""
    import numpy as np

    from relax_hetero.encoding.block_formats import block_format
    from relax_hetero.encoding.block_panels import BlockSource, Panels
    from relax_hetero.encoding.block_weights import panel_columns
    from relax_hetero.encoding.packed_layout import PackedLayout
    from relax_hetero.encoding.problem import Operand, QuantizedMatmulProblem
    from relax_hetero.target.cpu_target import cpu_target_of

    form = block_format("q4_0")
    source = BlockSource((np.zeros((512, 512 // form.superblock_size * form.superblock_bytes), "uint8"),), form, 512)
    packed = Panels(panel_columns(cpu_target_of(target_of(mcpu)))).pack(source)
    identity = PackedLayout.identity
    weights = tuple(Operand(each.shape, str(each.dtype), Panels.index_map, identity(each.ndim)) for each in packed)
    lhs, result = (Operand((rows, 512), "float32", ("m", name), identity(2)) for name in "kn")
    return QuantizedMatmulProblem(
        lhs, weights, result, form.block, None, form.bits, form, activation_bits=activation_bits
    )


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a library or an object file; without one, this library's products")
    parser.add_argument("pattern", nargs="?", default=".", help="regular expression of the names of functions")
    parser.add_argument("--smoke", action="store_true", help="one product of this library")
    arguments = parser.parse_args()
    if arguments.file:
        for name, loop in functions_of(arguments.file, arguments.pattern):
            print(f"{name:60} {loop}")
        return
    for mcpu, kinds in list(CPUS.items())[: 1 if arguments.smoke else None]:
        for types in kinds[: 1 if arguments.smoke else None]:
            print(f"{mcpu:14} {' x '.join(types[:2]):34} {our_loop(mcpu, product(mcpu, types))}")
    for mcpu in () if arguments.smoke else ("neoverse-n1", "neoverse-v2"):
        others = {f"convolution, {types[0]}": convolution(mcpu, types) for types in (*CPUS["neoverse-v2"], U8)}
        others["attention"] = attention(mcpu)
        for rows, bits in ((1, 16), (8, 16), (1, 8), (8, 8)):
            others[f"4 bits by {bits}, rows: {rows}"] = four_bits(mcpu, rows, bits)
        for name, problem in others.items():
            print(f"{mcpu:14} {name:34} {our_loop(mcpu, problem)}")


if __name__ == "__main__":
    main()
