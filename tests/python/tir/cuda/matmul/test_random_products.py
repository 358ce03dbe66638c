"""Random matrix products of every generator for GPUs, by the interpreter: sizes, types, storage, epilogues, symbols."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tvm import tirx
from tvm.target import Target

from gpu_interpreter import run
from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.problem import Epilogue, MatmulProblem, Operand
from relax_hetero.errors import EncodingError
from relax_hetero.target.element_types import bytes_of, numpy_dtype
from relax_hetero.target.gpu_target import gpu_target_of
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.matmul.mma_matmul import mma_matmul_kernel
from relax_hetero.tir.cuda.matmul.simt_matmul import simt_matmul_kernel
from relax_hetero.tir.cuda.matmul.skinny_gemm import skinny_gemm_kernel
from relax_hetero.tir.cuda.matmul.wgmma_matmul import wgmma_matmul_kernel

HOPPER, ADA, OLDER = (gpu_target_of(Target({"kind": "cuda", "arch": arch})) for arch in ("sm_90a", "sm_89", "sm_75"))
GENERATORS: dict[str, Callable[..., tirx.PrimFunc]] = {
    "wgmma": wgmma_matmul_kernel,
    "mma": mma_matmul_kernel,
    "few": skinny_gemm_kernel,
    "simt": simt_matmul_kernel,
}
SYMBOLS = {"b0": "s0", "b1": "s1", "m": "s2", "n": "s3", "k": "s4"}
TENSOR_TYPES = [
    ("float16", "float16", "float32"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float16"),
    ("float32", "float32", "float32"),
    ("int8", "int8", "int32"),
    ("uint8", "int8", "int32"),
    ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ("float8_e5m2", "float8_e4m3fn", "float32"),
]
ALL_TYPES = [*TENSOR_TYPES, ("float64", "float64", "float64"), ("int32", "int32", "int32")]
EPILOGUES = ["", "", "add(x0, x1)", "maximum(add(x0, x1), 0.0)", "add(multiply(x0, x1), x2)", "tanh(add(x0, x1))"]
FUNCTIONS = {"add": np.add, "multiply": np.multiply, "maximum": np.maximum, "tanh": np.tanh}


@dataclass
class Drawn:
    """A random product, its operands and what they give."""

    seed: int
    kind: str
    draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.rng = np.random.default_rng(self.seed)
        draw, kind = self.draw, self.kind
        self.types = draw.choice(ALL_TYPES if kind == "simt" else TENSOR_TYPES)
        rows = [1, 2, 5, 7, 8, 13, 16, 33, 64] if kind == "few" else [1, 3, 8, 33, 64, 65, 100, 130]
        self.batch = draw.choice([[], [], ["b0"], ["b0", "b1"]])
        self.sizes = {
            "m": draw.choice(rows),
            "n": draw.choice([1, 3, 8, 33, 64, 65, 100, 130]),
            "k": draw.choice([1, 7, 16, 31, 64, 72, 100, 128, 200]),
            **{name: draw.choice([1, 2, 3]) for name in self.batch},
        }
        self.is_packed = kind == "few" or (kind in ("wgmma", "mma") and draw.random() < 0.5)
        self.symbolic = draw.choice([[], [], ["m"], ["m", "b0"], ["m", "n", "k"]])
        self.left = self.names("mk", broadcasts=True)
        self.right = self.names("kn", broadcasts=True)
        if self.is_packed:
            self.right = [*(name for name in self.right if name.startswith("b")), "k", "n"]
            self.symbolic = [name for name in self.symbolic if name not in self.right]
        self.out = self.names("mn")
        self.stored: list[np.ndarray] = []
        self.problem, self.want = self.build()

    def names(self, last: str, broadcasts: bool = False) -> list[str]:
        """Dimensions of an operand: some batches missing, or the last two exchanged."""
        batch = self.batch[1:] if broadcasts and self.draw.random() < 0.3 else self.batch
        return [*batch, *(last if self.draw.random() < 0.75 else last[::-1])]

    def operand(self, names: Sequence[str], dtype: str, layout: PackedLayout | None = None) -> Operand:
        shape = tuple(
            1 if name == "1" else SYMBOLS[name] if name in self.symbolic else self.sizes[name] for name in names
        )
        return Operand(shape, dtype, tuple(names), layout or PackedLayout.identity(len(names)))

    def array(self, names: Sequence[str], dtype: str) -> np.ndarray:
        shape = [1 if name == "1" else self.sizes[name] for name in names]
        low = 0 if dtype == "uint8" else -3
        return self.rng.integers(low, 4, shape).astype(numpy_dtype(dtype))

    def wide(self, array: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """In float64, over all batches, m and n."""
        own = [name for name in names if name != "1"]
        order = [name for name in (*self.batch, "m", "n") if name in own]
        array = array.astype("float64").reshape([self.sizes[name] for name in own])
        array = array.transpose([own.index(name) for name in order])
        return array.reshape([self.sizes[name] if name in own else 1 for name in (*self.batch, "m", "n")])

    def build(self) -> tuple[MatmulProblem, np.ndarray]:
        left_type, right_type, acc = self.types
        layout = None
        if self.is_packed:
            rank = len(self.right)
            outer = (*range(rank - 2), rank - 1, rank - 2)
            layout = PackedLayout(outer, (rank - 1, rank - 2), (64, 128 // bytes_of(right_type)), swizzle=True)
        a, b = self.array(self.left, left_type), self.array(self.right, right_type)
        self.stored = [a, layout.pack(b) if layout else b]
        letters = {"b0": "a", "b1": "b", "m": "m", "n": "n", "k": "k"}
        left, right = ("".join(letters[name] for name in names) for names in (self.left, self.right))
        present = [name for name in self.batch if name in self.left or name in self.right]
        sums = np.einsum(
            f"{left},{right}->{''.join(letters[name] for name in present)}mn", a.astype("float64"), b.astype("float64")
        )
        want = self.wide(sums, [*present, "m", "n"]) + np.zeros([self.sizes[name] for name in (*self.batch, "m", "n")])
        init = None
        if self.draw.random() < 0.2:
            names = self.draw.choice([["n"], ["m", "n"], [*self.batch, "m", "n"]])
            init = self.operand(names, acc)
            self.stored.append(self.array(names, acc))
            want = want + self.wide(self.stored[-1], names)
        text = self.draw.choice(EPILOGUES) if acc.startswith("float") else ""
        epilogue = None
        if text:
            choices: list[list[str]] = [["n"], ["m"], [], [*self.batch, "m", "n"], ["1", "n"], ["m", "1"], ["n", "m"]]
            maps = [self.draw.choice(choices) for _ in range(2 if "x2" in text else 1)]
            epilogue = Epilogue(Expression.parse(text), tuple(self.operand(names, acc) for names in maps))
            values: dict[str, Any] = {"x0": want}
            for number, names in enumerate(maps, 1):
                self.stored.append(self.array(names, acc))
                values[f"x{number}"] = self.wide(self.stored[-1], names)
            want = eval(text, {**FUNCTIONS, **values})  # noqa: S307 (a text of this file)
        order = [*self.batch, "m", "n"]
        problem = MatmulProblem(
            self.operand(self.left, left_type),
            self.operand(self.right, right_type, layout),
            self.operand(self.out, acc),
            acc,
            init,
            epilogue,
            tf32=left_type == "float32" and self.kind != "simt",
        )
        return problem, want.transpose([order.index(name) for name in self.out])


def check(seed: int, kind: str) -> None:
    drawn = Drawn(seed, kind)
    gpu = {"mma": ADA, "simt": OLDER if seed % 2 else HOPPER}.get(kind, HOPPER)
    try:
        func = GENERATORS[kind](drawn.problem, gpu)
    except EncodingError as error:
        pytest.skip(str(error))
    assert is_one_launch(func)
    result = np.empty(drawn.want.shape, numpy_dtype(drawn.types[2]))
    result.reshape(-1).view(np.uint8)[...] = 0xFF
    run(func, *drawn.stored, result)
    tolerance = 2e-2 if drawn.types[2] == "float16" else 1e-5
    np.testing.assert_allclose(result.astype("float64"), drawn.want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 60))])
def test_random_products(seed: int, kind: str) -> None:
    check(seed, kind)


@pytest.mark.parametrize("seed", [74, 28, pytest.param(160, marks=pytest.mark.slow)])
def test_transposed_left_operands_of_few_rows(seed: int) -> None:
    """Tiles of fewer than 64 rows lack a stripe of 64 columns, and tiles of 64 are not read transposed."""
    assert Drawn(seed, "few").left[-1] == "m"
    check(seed, "few")


@pytest.mark.parametrize("seed", [45, pytest.param(16, marks=pytest.mark.slow)])
def test_integers_of_33_to_40_rows(seed: int) -> None:
    """For them wgmma has 32 columns and 48, and none in between."""
    drawn = Drawn(seed, "few")
    assert drawn.sizes["m"] == 33 and drawn.types[2] == "int32"
    check(seed, "few")
