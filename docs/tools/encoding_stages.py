"""The IR on encodings.md: a small model after each pass, and one with convolutions after the last passes.

python docs/tools/encoding_stages.py            # prints every stage
python docs/tools/encoding_stages.py --write    # puts them into encodings.md
python docs/tools/encoding_stages.py --check    # fails if encodings.md differs

The model's targets are fixed, so that every machine prints the same.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh

PAGE = Path(__file__).resolve().parents[1] / "explanation" / "encodings.md"
STAGES = (
    "RealizeVDevice",
    "SetEncoding",
    "PropagateEncodings",
    "SpecializeEncodings",
    "HoistEncodings",
    "MaterializeEncodings",
)
IMAGE_STAGES = ("MaterializeEncodings", "MovePermutes")
# The block of a stage on the page: <!-- SetEncoding --> and the fenced block after it.
BLOCK = re.compile(r"(<!-- (\w+) -->\n```text\n).*?(^```\n)", re.DOTALL | re.MULTILINE)
ENCODING = re.compile(r'"(\w+\[\d\]<[^"]*>)"')


@I.ir_module
class Model:
    """A layer on an AVX-512 CPU, added to a product with its weight on a portable device."""

    I.module_global_infos(
        {
            "vdevice": [
                I.vdevice({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 2}, 0),
                I.vdevice({"kind": "c"}, 1),
            ]
        }
    )

    @R.function
    def main(
        x: R.Tensor(("m", 40), "float32", "llvm:0"),  # noqa: F821 (the name of an extent)
        w: R.Tensor((40, 64), "float32"),
        bias: R.Tensor((64,), "float32"),
    ):
        with R.dataflow():
            y = R.matmul(x, w)
            z = R.add(y, bias)
            here = R.nn.relu(z)
            here_moved = R.to_vdevice(here, "c:0")
            x_moved = R.to_vdevice(x, "c:0")
            there = R.matmul(x_moved, w)
            total = R.add(there, here_moved)
            R.output(total)
        return total


@I.ir_module
class Image:
    """Two convolutions with a pooling between, a bias, a residual and an activation."""

    I.module_global_infos(
        {
            "vdevice": [
                I.vdevice({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64-v4", "num-cores": 2}, 0)
            ]
        }
    )

    @R.function
    def main(
        x: R.Tensor((1, 3, 32, 32), "float32"),
        w: R.Tensor((48, 3, 3, 3), "float32"),
        bias: R.Tensor((1, 48, 1, 1), "float32"),
        v: R.Tensor((48, 48, 3, 3), "float32"),
    ):
        with R.dataflow():
            a = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
            b = R.nn.relu(R.add(a, bias))
            p = R.nn.max_pool2d(b, pool_size=[2, 2], strides=[2, 2])
            c = R.nn.conv2d(p, v, padding=[1, 1, 1, 1])
            y = R.nn.relu(R.add(c, p))
            R.output(y)
        return y


def stages() -> dict[str, str]:
    """Text of ``main`` of `Model` after each pass, and of `Image` under names with the prefix ``Image``."""
    return {**model_stages(), **image_stages()}


def image_stages() -> dict[str, str]:
    """Modules of `Image` after the passes that decide where permutations stay."""
    generator = np.random.default_rng(0)
    shapes = {param.name: [int(extent) for extent in param.ty.shape.values] for param in Image["main"].params[1:]}
    weights = {name: generator.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    module, texts = relax.transform.BindParams("main", weights)(Image), {}
    for name in (*STAGES, *IMAGE_STAGES[1:]):
        module = getattr(rh.transform, name)()(module)
        if name in IMAGE_STAGES:
            texts[f"Image{name}"] = shown(module)
    return texts


def model_stages() -> dict[str, str]:
    """Modules of `Model` after each pass."""
    generator = np.random.default_rng(0)
    weights = {
        "w": generator.standard_normal((40, 64)).astype("float32"),
        "bias": generator.standard_normal(64).astype("float32"),
    }
    module = relax.transform.BindParams("main", weights)(Model)
    texts = {}
    for name in STAGES:
        module = getattr(rh.transform, name)()(module)
        texts[name] = shown(module)
    return texts


def shown(module: tvm.IRModule) -> str:
    """``main`` with encodings as aliases listed before it, as MLIR prints attributes."""
    # From Python 3.12 on, TVM would print names of extents as type parameters.
    lines = module.script(show_meta=False, extra_config={"script.use_pep695": False}).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    def main("))
    end = next(i for i, line in enumerate(lines[start:], start) if line.startswith("        return"))
    text = "\n".join(line[4:] for line in lines[start : end + 1])
    for index, shape in enumerate(constant_shapes(module["main"])):
        text = text.replace(f'metadata["ir.GenericConst"][{index}]', f"constant<{'x'.join(map(str, shape))}>")
    for noise in (", out_dtype=None", ', layout=""', ', kernel=""', "dtype=", "dst_vdevice=", "vdevice=", ":global"):
        text = text.replace(noise, "")
    aliases = {}
    for encoding in dict.fromkeys(ENCODING.findall(text)):
        name = ("lhs", "rhs", "result")[rh.encoding.Encoding.parse(encoding).operand_index]
        name = f"#{name}{sum(alias.startswith('#' + name) for alias in aliases) or ''}"
        aliases[name] = encoding
        text = text.replace(f'"{encoding}"', name)
    legend = [f"{name} = {encoding}" for name, encoding in aliases.items()]
    return "\n".join([*legend, *([""] if legend else []), text])


def constant_shapes(func: relax.Function) -> list[tuple[int, ...]]:
    """Shapes of the constants, in the order of their numbers in the printed text."""
    shapes: dict[Any, tuple[int, ...]] = {}

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GenericConst):
            shapes.setdefault(expr, tuple(expr.value.shape))

    relax.analysis.post_order_visit(func, visit)
    return list(shapes.values())


def main() -> int:
    """Print the stages, write them into the page, or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the blocks of encodings.md")
    parser.add_argument("--check", action="store_true", help="compare them with encodings.md")
    options = parser.parse_args()
    texts, page = stages(), PAGE.read_text()
    current = BLOCK.sub(lambda match: f"{match[1]}{texts[match[2]]}\n{match[3]}", page)
    if options.check:
        sys.stdout.writelines(difflib.unified_diff(page.splitlines(True), current.splitlines(True), "page", "now"))
        return int(current != page)
    if options.write:
        PAGE.write_text(current)
        return 0
    for name, text in texts.items():
        sys.stdout.write(f"# after {name}\n{text}\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
