"""Attacks on sizes that a model computes of other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx

from fuzz.sizes.attack import Attack, Call, data


def _chain(name: str, body: str, calls: Sequence[Call], inputs: str, result: str = "float") -> Attack:
    text = f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g ({inputs}) => ({result}[p] y)
        <int64 zero = {{0}}, int64 one = {{1}}, int64[1] first = {{0}}, int64[1] ones = {{1}}, int64[1] open = {{-1}},
         int64[1] two = {{2}}, int64[1] six = {{6}}> {{ {body} }}"""
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return Attack(f"{name}: chain", model, list(calls))


def chains(rng: np.random.Generator) -> Iterator[Attack]:
    """Sizes that the model computes of other sizes, and uses as shapes."""
    pairs = [
        {"x": data(n, m), "z": data(k)}
        for n, m, k in ((2, 3, 2), (2, 3, 3), (2, 3, 4), (0, 3, 0), (2, 0, 0), (2, 3, 0))
    ]
    both = "float[n, m] x, float[k] z"
    yield _chain("Reshape to [k, -1]", "s = Shape(z) t = Concat<axis=0>(s, open) y = Reshape(x, t)", pairs, both)
    yield _chain(
        "Reshape to [6 / k, -1]",
        "s = Shape(z) d = Div(six, s) t = Concat<axis=0>(d, open) y = Reshape(x, t)",
        pairs,
        both,
    )
    yield _chain(
        "Reshape to [6 % k, -1]",
        "s = Shape(z) d = Mod(six, s) t = Concat<axis=0>(d, open) y = Reshape(x, t)",
        pairs,
        both,
    )
    yield _chain(
        "Reshape to [n - k, -1]",
        "s = Shape(z) a = Shape<end=1>(x) d = Sub(a, s) t = Concat<axis=0>(d, open) y = Reshape(x, t)",
        pairs,
        both,
    )
    yield _chain(
        "ConstantOfShape of [n - k]",
        "s = Shape(z) a = Shape<end=1>(x) d = Sub(a, s) y = ConstantOfShape(d)",
        pairs,
        both,
    )
    yield _chain(
        "ConstantOfShape of [n // k]",
        "s = Shape(z) a = Shape<end=1>(x) d = Div(a, s) y = ConstantOfShape(d)",
        pairs,
        both,
    )
    yield _chain(
        "Expand to [k, n, m]", "s = Shape(z) a = Shape(x) d = Concat<axis=0>(s, a) y = Expand(x, d)", pairs, both
    )
    yield _chain(
        "Expand to [k, m]", "s = Shape(z) a = Shape<start=1>(x) d = Concat<axis=0>(s, a) y = Expand(x, d)", pairs, both
    )
    grown = [{"x": data(n)} for n in (1, 2, 0, 3)]
    squared = "s = Shape(x) a = Mul(s, s) b = Mul(a, a) c = Mul(b, b) d = Mul(c, c)"
    yield _chain("ConstantOfShape of n^16", f"{squared} y = ConstantOfShape(d)", grown, "float[n] x")
    yield _chain(
        "ConstantOfShape of n^64", f"{squared} e = Mul(d, d) f = Mul(e, e) y = ConstantOfShape(f)", grown, "float[n] x"
    )
    yield _chain(
        "Expand to [n^64, n]",
        f"{squared} e = Mul(d, d) f = Mul(e, e) t = Concat<axis=0>(f, s) y = Expand(x, t)",
        grown,
        "float[n] x",
    )
    yield _chain("Reshape to [n^64]", f"{squared} e = Mul(d, d) f = Mul(e, e) y = Reshape(x, f)", grown, "float[n] x")
    yield _chain("Tile n^32 times", f"{squared} e = Mul(d, d) y = Tile(x, e)", grown, "float[n] x")
    yield _chain("Slice from n - 2", "s = Shape(x) a = Sub(s, two) y = Slice(x, a, s, first)", grown, "float[n] x")
    yield _chain("Slice to n - 2", "s = Shape(x) a = Sub(s, two) y = Slice(x, first, a, first)", grown, "float[n] x")
    yield _chain(
        "Split at n - 2",
        "s = Shape(x) a = Sub(s, two) t = Concat<axis=0>(a, two) y, w = Split<axis=0>(x, t)",
        grown,
        "float[n] x",
    )
    yield _chain(
        "Pad by n - 2", "s = Shape(x) a = Sub(s, two) t = Concat<axis=0>(a, first) y = Pad(x, t)", grown, "float[n] x"
    )
    yield _chain(
        "Range to n - 2",
        "s = Shape(x) a = Sub(s, two) b = Squeeze(a) y = Range(zero, b, one)",
        grown,
        "float[n] x",
        "int64",
    )
    yield _chain(
        "Range from n by n - 2",
        "s = Shape(x) a = Sub(s, two) b = Squeeze(a) c = Squeeze(s) y = Range(zero, c, b)",
        grown,
        "float[n] x",
        "int64",
    )
    yield _chain(
        "OneHot of depth n",
        "s = Shape(x) b = Squeeze(s) v = Concat<axis=0>(first, ones) y = OneHot(s, b, v)",
        grown,
        "float[n] x",
        "int64",
    )
    yield _chain("TopK of n - 1", "s = Shape(x) k = Sub(s, ones) y, i = TopK(x, k)", grown, "float[n] x")
    yield _chain(
        "values of NonZero",
        "i = NonZero(x) y = Reshape(i, six)",
        [{"x": data(n)} for n in (6, 5, 0)],
        "float[n] x",
        "int64",
    )
    yield _chain(
        "rows of NonZero",
        "i = NonZero(x) s = Shape<start=1>(i) y = Expand(x, s)",
        [{"x": data(n)} for n in (6, 1, 0)] + [{"x": np.float32([0, 1])}],
        "float[n] x",
    )
    yield _chain(
        "Resize to n",
        "s = Shape(x) y = Resize(x, , , s)",
        [{"x": data(1, 1, n, n)} for n in (2, 1)],
        "float[1, 1, n, n] x",
    )
    huge = [{"x": np.zeros((n, m), "int8")} for n, m in ((0, 2**33), (2**33, 0), (2, 2))]
    outer = "a = Shape<end=1>(x) b = Shape<start=1>(x) t = Concat<axis=0>(b, b) y = ConstantOfShape(t)"
    yield _chain("ConstantOfShape of [m, m]", outer, huge, "int8[n, m] x")
    yield _chain(
        "Transpose x X", "t = Transpose(x) f = Cast<to=1>(t) g = Cast<to=1>(x) y = MatMul(f, g)", huge, "int8[n, m] x"
    )
    yield _chain(
        "outer sum",
        "u = Unsqueeze(x, first) v = Unsqueeze(x, ones) y = Add(u, v)",
        [{"x": data(n)} for n in (2, 0)],
        "float[n] x",
    )
