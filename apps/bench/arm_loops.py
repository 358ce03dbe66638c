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
from collections.abc import Iterator
from dataclasses import dataclass

PRODUCTS = re.compile(r"fml[as]l?[2bt]?|mla|[su]ml[as]l2?[bt]?|[su]dot|s?us?dot|[us]?s?u?mmla|bf(mmla|dot|mlal[bt])")

F32, BF16 = ("float32",) * 3, ("bfloat16", "bfloat16", "float32")
F16, S8 = ("float16", "float16", "float32"), ("int8", "int8", "int32")
CPUS = {"neoverse-n1": (F32, F16, S8), "neoverse-v2": (F32, F16, BF16, S8)}


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


def our_loop(mcpu: str, types: tuple[str, str, str], shape: tuple[int, int, int]) -> Loop | None:
    """The main loop of this library's product."""
    import tvm

    import relax_hetero as rh
    from relax_hetero.encoding.encoding import LHS, RESULT, RHS, Encoding
    from relax_hetero.encoding.problem import MatmulProblem, Operand

    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 2})
    resolver = rh.encoding.resolver_for(target)
    m, k, n = shape
    maps = (("m", "k"), ("k", "n"), ("m", "n"))
    sizes = {"m": m, "n": n, "k": k}
    operands = []
    for index, dtype in zip((LHS, RHS, RESULT), (types[0], types[1], types[2]), strict=True):
        encoding = Encoding("matmul", index, types, maps, tuple(sizes.items()))
        layout = resolver.resolve(encoding, target)
        operands.append(Operand(tuple(sizes[name] for name in maps[index]), dtype, maps[index], layout))
    problem = MatmulProblem(*operands, types[2])
    function = resolver.kernel(problem, target)
    module = tvm.compile(tvm.IRModule({"matmul": function}), target=target)
    lines: list[tuple[str, str]] = []
    label = ""
    for line in module.mod.inspect_source("asm").splitlines():
        code = re.split("//", line)[0].strip()
        if start := re.fullmatch(r"(\.L\w+):", code):
            label = start[1]
        elif code and not code.startswith(".") and not code.endswith(":"):
            lines.append((label, code))
            label = ""
    return main_loop(lines)


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
            print(f"{mcpu:12} {' x '.join(types[:2]):22} {our_loop(mcpu, types, (256, 512, 512))}")


if __name__ == "__main__":
    main()
