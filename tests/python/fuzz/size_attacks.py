"""Models of one ONNX op whose sizes only a call knows, and calls of them: sizes that agree, contradict, or are extreme.

`attacks` yields them; `test_size_attacks.py` and the fuzzing harness compare each call with ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HUGE = 2**31
LARGEST = 2**63 - 1
LEAST = -(2**63)

Dims = Sequence[Any]
"""Dimensions of an input: names are symbolic."""

Call = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Attack:
    """A model and the inputs of calls of it.

    Attributes
    ----------
    name: the op, and the sizes that vary.
    calls: arrays by the names of the model's inputs.
    """

    name: str
    model: onnx.ModelProto
    calls: Sequence[Call]


def data(*shape: int, dtype: str = "float32") -> np.ndarray:
    """The numbers 1, 2, 3 … in this shape."""
    return (np.arange(int(np.prod(shape)), dtype="float64") % 100 + 1).reshape(shape).astype(dtype)


def ints(*values: int, dtype: str = "int64") -> np.ndarray:
    """A vector of sizes."""
    return np.array(values, dtype)


def scalar(value: Any, dtype: str = "int64") -> np.ndarray:
    """One number, of rank 0."""
    return np.array(value, dtype)


def one_op(
    op: str,
    dims: Mapping[str, Dims],
    calls: Sequence[Call],
    constants: Mapping[str, np.ndarray] | None = None,
    order: Sequence[str] | None = None,
    outputs: int = 1,
    result: int = TensorProto.FLOAT,
    results: Sequence[int] | None = None,
    opset: int = 18,
    label: str = "",
    domain: str = "",
    **attributes: Any,
) -> Attack:
    """An attack on one node.

    Parameters
    ----------
    dims: the dimensions of each input; its element type is that of the first call's array.
    constants: inputs that are initializers.
    order: names of the node's inputs, "" for one that is left out; by default inputs, then constants.
    result: element type of the outputs, `results` of each one.
    """
    constants = constants or {}
    first = calls[0]
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(first[name]).dtype), list(shape))
        for name, shape in dims.items()
    ]
    names = [f"y{i}" for i in range(outputs)]
    types = results or [result] * outputs
    node = helper.make_node(op, list(order or [*dims, *constants]), names, name="the_node", domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "attacked",
        infos,
        [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, types, strict=True)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    text = label or ", ".join(f"{name}{list(shape)}" for name, shape in dims.items())
    return Attack(f"{op}: {text}", model, list(calls))


def extremes() -> list[int]:
    """Numbers that sizes are attacked with."""
    return [0, 1, -1, -2, 2, 3, 4, 5, HUGE, LARGEST, LEAST, 2**32 + 3, 2**62]


def _targets(rng: np.random.Generator, length: int, count: int) -> list[np.ndarray]:
    """Random vectors of sizes, extreme ones among them."""
    small, all_of = [0, 1, 2, 3, 6, -1], extremes()
    found = []
    for _ in range(count):
        pool = all_of if rng.random() < 0.4 else small
        found.append(np.array([pool[int(rng.integers(len(pool)))] for _ in range(length)], "int64"))
    return found


def shapes(rng: np.random.Generator) -> Iterator[Attack]:
    """Ops that take a shape."""
    wanted = [ints(2, 3), ints(3, 2), ints(6, 1), ints(4, 4), ints(2, 2), ints(-1, 4), ints(-1, 3), ints(-1, -1)]
    wanted += [ints(-2, -3), ints(0, 3), ints(0, 0), ints(3, 0), ints(0, -1), ints(-1, 0), ints(HUGE, HUGE)]
    wanted += [ints(LARGEST, LARGEST), ints(LEAST, 1), ints(-1, LARGEST), ints(2**32, 2**32), ints(1, 6), ints(-1, -2)]
    wanted += [
        ints(2**62, 4),
        ints(2**63 - 6, 1),
        ints(2**32 + 1, 6),
        ints(3 * 2**62 % 2**63, 2),
        *_targets(rng, 2, 12),
    ]
    for allow in (0, 1):
        yield one_op(
            "Reshape",
            {"x": [2, 3], "t": [2]},
            [{"x": data(2, 3), "t": t} for t in wanted],
            label=f"target {allow}",
            allowzero=allow,
        )
        yield one_op(
            "Reshape",
            {"x": ["a", "b"], "t": [2]},
            [{"x": data(*s), "t": t} for t in wanted for s in ((2, 3), (0, 3), (1, 0))],
            label=f"symbolic {allow}",
            allowzero=allow,
        )
    three = [
        ints(2, 3, 1),
        ints(0, 0, 1),
        ints(0, 0, 0),
        ints(1, 1, 1),
        ints(-1, 2, 3),
        ints(2, -1, 4),
        ints(HUGE, 1, 1),
    ]
    yield one_op("Reshape", {"x": ["n"], "t": [3]}, [{"x": data(n), "t": t} for t in three for n in (6, 1, 0)])
    yield one_op("Reshape", {"x": ["n"], "t": ["k"]}, [{"x": data(6), "t": t} for t in (ints(6), ints(2, 3))])
    for target in (
        ints(2, 6),
        ints(-1, 6),
        ints(0, 2, 2),
        ints(0, -1),
        ints(1, 4),
        ints(1, -1),
        ints(0, 4),
        ints(-1, 8),
    ):
        yield one_op(
            "Reshape",
            {"x": ["n", 4]},
            [{"x": data(n, 4)} for n in (3, 1, 2, 0, 5)],
            {"t": target},
            label=f"x[n,4] to {target.tolist()}",
        )
    grown = [ints(3), ints(5), ints(2), ints(1), ints(0), ints(-1), ints(-2), ints(HUGE), ints(LARGEST), ints(LEAST)]
    yield one_op("Expand", {"x": [3], "t": [1]}, [{"x": data(3), "t": t} for t in grown])
    yield one_op("Expand", {"x": [1], "t": [1]}, [{"x": data(1), "t": t} for t in [*grown, ints(2**62)]])
    yield one_op("Expand", {"x": ["n"], "t": [1]}, [{"x": data(n), "t": t} for t in grown for n in (3, 1, 0)])
    pairs = [*wanted, ints(2, 3), ints(1, 3), ints(1, 1)]
    yield one_op("Expand", {"x": ["n", 1], "t": [2]}, [{"x": data(n, 1), "t": t} for t in pairs for n in (1, 2)])
    yield one_op("Expand", {"x": ["n"], "t": [2]}, [{"x": data(n), "t": t} for t in pairs for n in (1, 3)])
    yield one_op(
        "Expand", {"x": ["n", 3]}, [{"x": data(n, 3)} for n in (1, 2, 4, 0)], {"t": ints(4, 1)}, label="to [4,1]"
    )
    yield one_op("Expand", {"x": [1, 1]}, [{"x": data(1, 1)}], {"t": ints(HUGE, HUGE)}, label="static huge")
    yield one_op("Expand", {"x": [1, 1]}, [{"x": data(1, 1)}], {"t": ints(-1, -2)}, label="static negative")
    yield one_op("ConstantOfShape", {"t": [2]}, [{"t": t} for t in wanted])
    yield one_op("ConstantOfShape", {"t": [1]}, [{"t": t} for t in grown])
    for target in (ints(HUGE, HUGE), ints(-1, 2), ints(LARGEST, 2), ints(2**40)):
        yield one_op(
            "ConstantOfShape",
            {"x": [1]},
            [{"x": data(1)}],
            {"t": target},
            order=["t"],
            label=f"static {target.tolist()}",
        )
    times = [ints(1), ints(2), ints(0), ints(-1), ints(HUGE), ints(LARGEST), ints(LEAST), ints(2**62)]
    yield one_op("Tile", {"x": [3], "r": [1]}, [{"x": data(3), "r": r} for r in times])
    yield one_op("Tile", {"x": ["n"], "r": [1]}, [{"x": data(n), "r": r} for r in times for n in (3, 0)])
    yield one_op("Tile", {"x": ["n", 2], "r": [2]}, [{"x": data(2, 2), "r": r} for r in wanted])
    yield one_op("Tile", {"x": ["n"]}, [{"x": data(n)} for n in (0, 1, 3)], {"r": ints(HUGE * HUGE)}, label="huge")
    yield one_op("Tile", {"x": ["n"]}, [{"x": data(n)} for n in (0, 1, 3)], {"r": ints(-1)}, label="negative")


def ranges(rng: np.random.Generator) -> Iterator[Attack]:
    """Range: starts, limits and steps, zero and not numbers among them."""
    triples = [(0, 5, 1), (0, 5, 2), (5, 0, -1), (0, 5, 0), (0, 5, -1), (0, 0, 0), (5, 0, 1), (0, HUGE * HUGE // 2, 1)]
    triples += [(LEAST, LARGEST, 1), (LARGEST, LEAST, -1), (0, LARGEST, 1), (LEAST, 0, LEAST), (0, LARGEST, LARGEST)]
    triples += [
        (LARGEST - 2, LARGEST, 1),
        (LEAST, LARGEST, LARGEST),
        (LEAST, LARGEST, 2**62),
        (3, 3, LEAST),
        (-4, 7, 3),
    ]
    names = ("s", "l", "d")
    for dtype, kind in (("int64", TensorProto.INT64), ("int32", TensorProto.INT32)):
        fits = [t for t in triples if all(abs(v) < HUGE for v in t)] if dtype == "int32" else triples
        fits = fits if dtype == "int64" else [*fits, (-HUGE, HUGE - 1, HUGE - 1), (HUGE - 3, HUGE - 1, 1)]
        yield one_op(
            "Range",
            {n: [] for n in names},
            [dict(zip(names, (scalar(v, dtype) for v in t), strict=True)) for t in fits],
            result=kind,
            label=dtype,
        )
    floats = [(0, 1, 0.25), (0, 1, 0), (1, 0, -0.5), (0, 1, np.nan), (np.nan, 1, 1), (0, np.nan, 1), (0, np.inf, 1)]
    floats += [(0, 1, np.inf), (0, 1, 1e-30), (0, 1e30, 1), (-np.inf, 0, 1), (0, -1, 1), (0, 1, -0.0), (0, 0, 0)]
    floats += [(0, 1, 0.1), (0, 1, 0.3), (2, 10.5, 1.5)]
    for dtype, kind in (("float32", TensorProto.FLOAT), ("float64", TensorProto.DOUBLE)):
        yield one_op(
            "Range",
            {n: [] for n in names},
            [dict(zip(names, (scalar(v, dtype) for v in t), strict=True)) for t in floats],
            result=kind,
            label=dtype,
        )
    # The limit is a symbolic size, the step too.
    yield _range_of_sizes("n", "1", [{"x": data(n)} for n in (0, 1, 4)])
    yield _range_of_sizes("n", "n", [{"x": data(n)} for n in (0, 1, 4)])
    yield _range_of_sizes("n", "0", [{"x": data(n)} for n in (0, 4)])
    for delta in (0, 1, -1):
        yield one_op(
            "Range",
            {"l": []},
            [{"l": scalar(v)} for v in (0, 3, -3, LARGEST)],
            {"s": scalar(0), "d": scalar(delta)},
            order=["s", "l", "d"],
            result=TensorProto.INT64,
            label=f"step {delta}",
        )


def _range_of_sizes(limit: str, step: str, calls: Sequence[Call]) -> Attack:
    steps = {"n": "n", "1": "one", "0": "zero"}
    text = f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => (int64[m] y) <int64 zero = {{0}}, int64 one = {{1}}> {{
            s = Shape(x)
            n = Gather(s, zero)
            y = Range(zero, {steps[limit]}, {steps[step]})
        }}"""
    return Attack(f"Range: symbolic, step {step}", onnx.parser.parse_model(text), list(calls))


def cuts(rng: np.random.Generator) -> Iterator[Attack]:
    """Slice, Split, Pad, Squeeze, Unsqueeze, Concat, SpaceToDepth and its kin."""
    numbers = [0, 1, -1, 3, -3, 5, 100, -100, HUGE, LARGEST, LEAST, LEAST + 1]
    calls = []
    for _ in range(40):
        start, end = (numbers[int(rng.integers(len(numbers)))] for _ in range(2))
        step = [1, -1, 2, -2, LARGEST, LEAST, 0, 3, LEAST + 1][int(rng.integers(9))]
        calls.append(
            {"x": data(int(rng.integers(0, 6))), "s": ints(start), "e": ints(end), "a": ints(0), "p": ints(step)}
        )
    calls += [
        {"x": data(5), "s": ints(0), "e": ints(5), "a": ints(a), "p": ints(1)} for a in (-1, 0, 1, -2, HUGE, LEAST)
    ]
    calls += [
        {"x": data(5), "s": ints(s), "e": ints(e), "a": ints(0), "p": ints(p)}
        for s, e, p in (
            (0, 5, 0),
            (LARGEST, LEAST, -1),
            (LEAST, LARGEST, 1),
            (4, LEAST, -2),
            (LARGEST, LEAST, LEAST),
            (0, LARGEST, LARGEST),
            (3, 0, -1),
            (-1, -100, -1),
            (-100, 5, -1),
        )
    ]
    yield one_op("Slice", {"x": ["n"], "s": [1], "e": [1], "a": [1], "p": [1]}, calls)
    two = {"x": ["n", 3], "s": [2], "e": [2], "a": [2]}
    yield one_op(
        "Slice",
        two,
        [
            {"x": data(4, 3), "s": ints(1, 1), "e": ints(3, 3), "a": a}
            for a in (ints(0, 1), ints(1, 0), ints(0, 0), ints(-1, 1))
        ],
    )
    yield one_op(
        "Slice",
        {"x": ["n"]},
        [{"x": data(n)} for n in (0, 1, 2, 5)],
        {"s": ints(1), "e": ints(-1), "a": ints(0)},
        label="x[1:-1] symbolic",
    )
    yield one_op(
        "Slice",
        {"x": ["n"]},
        [{"x": data(n)} for n in (0, 1, 2, 5)],
        {"s": ints(-2), "e": ints(LEAST), "a": ints(0), "p": ints(-1)},
        label="x[-2::-1] symbolic",
    )
    parts = [
        ints(2, 3),
        ints(2, 4),
        ints(5, 0),
        ints(0, 5),
        ints(-1, 6),
        ints(6, -1),
        ints(LARGEST, LEAST + 6),
        ints(1, 1),
    ]
    yield one_op("Split", {"x": [5], "p": [2]}, [{"x": data(5), "p": p} for p in parts], outputs=2, axis=0)
    yield one_op(
        "Split", {"x": ["n"], "p": [2]}, [{"x": data(n), "p": p} for p in parts for n in (5, 0)], outputs=2, axis=0
    )
    for part in parts[:6]:
        yield one_op(
            "Split",
            {"x": ["n"]},
            [{"x": data(n)} for n in (5, 6, 4, 2, 0)],
            {"p": part},
            outputs=2,
            axis=0,
            label=f"n into {part.tolist()}",
        )
    yield one_op("Split", {"x": ["n"]}, [{"x": data(n)} for n in (4, 5, 1, 0, 2, 3)], outputs=2, axis=0, num_outputs=2)
    yield one_op("Split", {"x": ["n"]}, [{"x": data(n)} for n in (4, 5, 1, 0, 6)], outputs=2, axis=0, opset=13)
    yield one_op("Split", {"x": ["n"]}, [{"x": data(n)} for n in (3, 4, 7, 1)], outputs=3, axis=0, num_outputs=3)
    widths = [
        (0, 0),
        (1, 2),
        (-1, 0),
        (-2, -2),
        (-3, -3),
        (-5, 6),
        (HUGE, 0),
        (LARGEST, LARGEST),
        (LEAST, 1),
        (0, 2**62),
    ]
    for mode in ("constant", "edge", "reflect", "wrap"):
        yield one_op(
            "Pad",
            {"x": ["n"], "p": [2]},
            [{"x": data(n), "p": ints(*w)} for w in widths for n in (4, 1, 0)],
            label=f"run-time {mode}",
            mode=mode,
            opset=19,
        )
        for width in ((1, 2), (-2, 0), (-2, -1), (3, 3)):
            yield one_op(
                "Pad",
                {"x": ["n"]},
                [{"x": data(n)} for n in (4, 1, 0, 2, 3)],
                {"p": ints(*width)},
                label=f"{mode} {width} of n",
                mode=mode,
                opset=19,
            )
    yield one_op("Pad", {"x": [4]}, [{"x": data(4)}], {"p": ints(HUGE, 2**60)}, label="static huge")
    yield one_op("Squeeze", {"x": ["a", "b"]}, [{"x": data(*s)} for s in ((1, 3), (2, 3), (0, 3))], {"a": ints(0)})
    yield one_op("Squeeze", {"x": ["a", 3], "t": [1]}, [{"x": data(1, 3), "t": ints(a)} for a in (0, 1, -2, 5)])
    yield one_op("Squeeze", {"x": ["a", "b"]}, [{"x": data(*s)} for s in ((1, 3), (2, 3), (1, 1))], label="all")
    yield one_op("Unsqueeze", {"x": ["a"], "t": [1]}, [{"x": data(3), "t": ints(a)} for a in (0, 1, -1, 5, LARGEST)])
    both = {"x": ["a", "b"], "z": ["c", "d"]}
    sizes = [((2, 3), (2, 3)), ((2, 3), (4, 3)), ((2, 3), (2, 5)), ((0, 3), (2, 3)), ((1, 3), (2, 2)), ((0, 2), (2, 3))]
    pairs = [{"x": data(*p), "z": data(*q)} for p, q in sizes]
    for axis in (0, 1):
        yield one_op("Concat", both, pairs, label=f"axis {axis}", axis=axis)
    yield one_op(
        "DepthToSpace", {"x": [1, "c", 2, 2]}, [{"x": data(1, c, 2, 2)} for c in (4, 6, 8, 1, 0, 3)], blocksize=2
    )
    yield one_op(
        "DepthToSpace",
        {"x": [1, "c", 2, 2]},
        [{"x": data(1, c, 2, 2)} for c in (4, 6, 8)],
        blocksize=2,
        mode="CRD",
        label="CRD",
    )
    yield one_op(
        "SpaceToDepth",
        {"x": [1, 2, "h", "w"]},
        [{"x": data(1, 2, h, w)} for h, w in ((2, 2), (4, 2), (3, 2), (2, 5), (0, 2))],
        blocksize=2,
    )
    for axis in (0, 1, 2):
        yield one_op("Flatten", {"x": ["a", "b"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3), (2, 0))], axis=axis)
    yield one_op(
        "Trilu",
        {"x": ["a", "b"], "k": []},
        [{"x": data(*s), "k": scalar(k)} for s in ((2, 3), (0, 3), (3, 1)) for k in (0, 1, -1, 9, LARGEST, LEAST)],
    )
    yield one_op(
        "CenterCropPad",
        {"x": ["a", 4]},
        [{"x": data(a, 4)} for a in (0, 1, 2, 3, 7)],
        {"t": ints(3, 3)},
        label="to [3,3]",
    )
    yield one_op(
        "CenterCropPad",
        {"x": [4, 4], "t": [2]},
        [{"x": data(4, 4), "t": t} for t in (ints(3, 5), ints(-1, 2), ints(HUGE, HUGE))],
    )
    yield one_op(
        "Col2Im",
        {"x": [1, "c", "l"]},
        [{"x": data(1, c, n)} for c, n in ((4, 4), (8, 4), (6, 4), (4, 3), (4, 5), (3, 4), (0, 4))],
        {"i": ints(4, 4), "b": ints(2, 2)},
        strides=[2, 2],
    )


def products(rng: np.random.Generator) -> Iterator[Attack]:
    """Products and convolutions whose operands' sizes have to agree."""
    pairs = [((2, 3), (3, 2)), ((2, 3), (4, 2)), ((2, 4), (3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 2)), ((2, 1), (3, 2))]
    pairs += [((2, 3), (1, 2)), ((2, 0), (3, 2)), ((2, 3), (0, 2))]
    yield one_op("MatMul", {"x": ["n", "a"], "w": ["b", 2]}, [{"x": data(*p), "w": data(*q)} for p, q in pairs])
    yield one_op(
        "MatMul", {"x": ["n", "a"]}, [{"x": data(*p)} for p, _ in pairs], {"w": data(3, 2)}, label="constant weight"
    )
    yield one_op("MatMul", {"x": ["n", 3], "w": ["b", "c"]}, [{"x": data(2, 3), "w": data(*q)} for _, q in pairs])
    batches = [
        ((2, 2, 3), (2, 3, 2)),
        ((2, 2, 3), (3, 3, 2)),
        ((1, 2, 3), (3, 3, 2)),
        ((2, 2, 3), (1, 3, 2)),
        ((0, 2, 3), (1, 3, 2)),
    ]
    yield one_op("MatMul", {"x": ["p", 2, 3], "w": ["q", 3, 2]}, [{"x": data(*p), "w": data(*q)} for p, q in batches])
    vectors = [((3,), (3,)), ((3,), (4,)), ((0,), (0,)), ((1,), (3,))]
    yield one_op("MatMul", {"x": ["a"], "w": ["b"]}, [{"x": data(*p), "w": data(*q)} for p, q in vectors])
    yield one_op(
        "Gemm",
        {"x": ["n", "a"], "w": ["b", "m"], "c": ["k"]},
        [{"x": data(*p), "w": data(*q), "c": data(k)} for p, q in pairs for k in (2, 1, 3, 0)],
    )
    yield one_op(
        "Gemm",
        {"x": ["a", "n"], "w": ["b", "m"]},
        [{"x": data(*p), "w": data(*q)} for p, q in pairs],
        transA=1,
        transB=1,
        label="transposed",
    )
    yield one_op(
        "Einsum",
        {"x": ["n", "a"], "w": ["b", "m"]},
        [{"x": data(*p), "w": data(*q)} for p, q in pairs],
        equation="ij,jk->ik",
    )
    yield one_op(
        "Einsum", {"x": ["n", "a"]}, [{"x": data(*s)} for s in ((3, 3), (2, 3), (3, 2), (1, 3))], equation="ii->i"
    )
    yield one_op(
        "Einsum",
        {"x": ["a", "b", "c"], "w": ["d", "e"]},
        [{"x": data(*p), "w": data(*q)} for p, q in (((2, 3, 4), (4, 5)), ((2, 3, 4), (3, 5)), ((2, 3, 1), (4, 5)))],
        equation="bij,jk->bik",
        label="batched",
    )
    images = [{"x": data(n, c, 4, 4)} for n, c in ((1, 3), (2, 3), (1, 5), (1, 1), (1, 0), (0, 3), (1, 6), (1, 20000))]
    yield one_op("Conv", {"x": ["n", "c", 4, 4]}, images, {"w": data(2, 3, 3, 3)}, label="channels")
    yield one_op("Conv", {"x": ["n", "c", 4, 4]}, images, {"w": data(6, 1, 3, 3)}, label="depthwise", group=3)
    yield one_op(
        "Conv",
        {"x": [1, 2, "h", "w"]},
        [{"x": data(1, 2, h, w)} for h, w in ((4, 4), (3, 3), (2, 4), (1, 1), (0, 4))],
        {"k": data(2, 2, 3, 3)},
        label="image smaller than the kernel",
    )
    yield one_op(
        "Conv",
        {"x": [1, 3, 4, 4], "w": ["o", "i", 3, 3]},
        [{"x": data(1, 3, 4, 4), "w": data(o, i, 3, 3)} for o, i in ((2, 3), (2, 2), (2, 4), (0, 3), (1, 1))],
        label="weight given",
    )
    yield one_op(
        "Conv",
        {"x": [1, 3, 4, 4], "b": ["k"]},
        [{"x": data(1, 3, 4, 4), "b": data(k)} for k in (2, 1, 3, 0)],
        {"w": data(2, 3, 3, 3)},
        order=["x", "w", "b"],
        label="bias",
    )
    yield one_op("ConvTranspose", {"x": ["n", "c", 4, 4]}, images[:-1], {"w": data(3, 2, 3, 3)}, label="channels")
    yield one_op(
        "ConvTranspose",
        {"x": [1, 2, "h", 4]},
        [{"x": data(1, 2, h, 4)} for h in (1, 0, 4)],
        {"w": data(2, 2, 3, 3)},
        pads=[2, 0, 2, 0],
        label="all cut away",
    )
    small = [{"x": data(1, 2, h, w)} for h, w in ((4, 4), (3, 3), (2, 4), (1, 1), (0, 4))]
    for op in ("MaxPool", "AveragePool", "LpPool"):
        yield one_op(op, {"x": [1, 2, "h", "w"]}, small, kernel_shape=[3, 3])
        yield one_op(
            op, {"x": [1, 2, "h", "w"]}, small, kernel_shape=[2, 2], strides=[2, 2], pads=[1, 1, 0, 0], label="padded"
        )
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield one_op(op, {"x": ["n", "c", "h", "w"]}, [*small, {"x": data(0, 2, 2, 2)}, {"x": data(1, 0, 2, 2)}])
    bytes_of = {"x": ["n", "a"], "w": ["b", 2]}
    yield one_op(
        "MatMulInteger",
        bytes_of,
        [{"x": data(*p, dtype="uint8"), "w": data(*q, dtype="uint8")} for p, q in pairs],
        result=TensorProto.INT32,
    )
    for axis in (0, 1):
        yield one_op(
            "DequantizeLinear",
            {"x": ["a", "b"], "s": ["k"]},
            [{"x": data(2, 3, dtype="uint8"), "s": data(k)} for k in (1, 2, 3, 4, 0)],
            label=f"scales of axis {axis}",
            axis=axis,
        )
        yield one_op(
            "QuantizeLinear",
            {"x": ["a", "b"]},
            [{"x": data(*s)} for s in ((2, 3), (3, 2), (1, 1), (3, 3), (0, 2))],
            {"s": data(3)},
            result=TensorProto.UINT8,
            label=f"3 scales of axis {axis}",
            axis=axis,
        )
        yield one_op(
            "DequantizeLinear",
            {"x": ["a", "b"]},
            [{"x": data(*s, dtype="uint8")} for s in ((2, 3), (3, 2), (1, 1), (3, 3), (0, 2))],
            {"s": data(3)},
            label=f"3 scales of axis {axis}",
            axis=axis,
        )


def norms(rng: np.random.Generator) -> Iterator[Attack]:
    """Norms whose vectors have to be as long as an axis."""
    lengths = [(3, 3), (3, 1), (3, 4), (3, 2), (1, 3), (0, 0), (3, 0), (0, 3)]
    four = {"s": ["k"], "b": ["k"], "m": ["k"], "v": ["k"]}
    given = [{"x": data(2, c, 2), **{name: data(k) for name in four}} for c, k in lengths]
    yield one_op("BatchNormalization", {"x": [2, "c", 2], **four}, given, opset=15)
    fixed = {name: data(3) for name in four}
    yield one_op(
        "BatchNormalization",
        {"x": [2, "c", 2]},
        [{"x": data(2, c, 2)} for c in (3, 1, 4, 2, 0, 5)],
        fixed,
        opset=15,
        label="constants",
    )
    each = {"s": ["p"], "b": ["q"], "m": ["r"], "v": ["t"]}
    uneven = [
        {"x": data(2, 3, 2), **{name: data(k if name == one else 3) for name in each}}
        for one in each
        for k in (1, 2, 4)
    ]
    yield one_op("BatchNormalization", {"x": [2, "c", 2], **each}, uneven, opset=15, label="uneven")
    pair = [{"x": data(2, c, 2), "s": data(k), "b": data(k)} for c, k in lengths]
    three = {"x": ["n", "c", 2], "s": ["k"], "b": ["l"]}
    yield one_op("InstanceNormalization", three, [*pair, {"x": data(2, 3, 2), "s": data(3), "b": data(1)}])
    yield one_op(
        "GroupNormalization",
        {"x": [2, 4, 2], "s": ["k"], "b": ["k"]},
        [{"x": data(2, 4, 2), "s": data(k), "b": data(k)} for k in (4, 1, 2, 3, 0)],
        num_groups=2,
        opset=21,
    )
    last = [{"x": data(2, 2, c), "s": data(k), "b": data(k)} for c, k in lengths]
    yield one_op("LayerNormalization", {"x": ["n", 2, "c"], "s": ["k"], "b": ["l"]}, last)
    yield one_op(
        "LayerNormalization",
        {"x": ["n", 2, "c"]},
        [{"x": data(2, 2, c)} for c in (3, 1, 4, 0)],
        {"s": data(3), "b": data(3)},
        label="constants",
    )
    yield one_op(
        "RMSNormalization",
        {"x": ["n", 2, "c"], "s": ["k"]},
        [{"x": call["x"], "s": call["s"]} for call in last],
        opset=23,
    )
    for op in ("LRN",):
        yield one_op(op, {"x": ["n", "c", 2, 2]}, [{"x": data(1, c, 2, 2)} for c in (3, 1, 0)], size=3)
    yield one_op(
        "PRelu", {"x": [2, "c", 2], "s": ["k", 1]}, [{"x": -data(2, c, 2), "s": data(k, 1)} for c, k in lengths]
    )


def attention(rng: np.random.Generator) -> Iterator[Attack]:
    """Attention, layers of recurrence, and the sizes that their inputs share."""
    dims = {"q": ["b", 2, "s", 4], "k": ["b", 2, "t", 4], "v": ["b", 2, "u", 4]}
    calls = [
        {"q": data(1, 2, 3, 4), "k": data(1, 2, t, 4), "v": data(1, 2, u, 4)}
        for t, u in ((5, 5), (5, 3), (3, 5), (1, 4))
    ]
    yield one_op("Attention", dims, calls, opset=23, label="keys and values")
    heads = {"q": ["b", "h", 3, "d"], "k": ["c", "i", 5, "e"], "v": ["p", "j", 5, 4]}
    calls = [
        {"q": data(*q), "k": data(*k), "v": data(*v)}
        for q, k, v in (
            ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
            ((1, 2, 3, 4), (1, 2, 5, 3), (1, 2, 5, 4)),
            ((2, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
            ((1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
            ((1, 3, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
            ((1, 2, 3, 4), (1, 1, 5, 4), (1, 2, 5, 4)),
        )
    ]
    yield one_op("Attention", heads, calls, opset=23, label="heads and batches")
    masked = {**dims, "m": ["f", "g"]}
    calls = [
        {"q": data(1, 2, 3, 4), "k": data(1, 2, 5, 4), "v": data(1, 2, 5, 4), "m": data(*m)}
        for m in ((3, 5), (1, 5), (3, 1), (3, 4), (2, 5), (1, 1))
    ]
    yield one_op("Attention", masked, calls, opset=23, label="mask")
    flat = {"q": ["b", 3, "x"], "k": ["b", "t", "y"], "v": ["b", "u", "z"]}
    calls = [
        {"q": data(1, 3, x), "k": data(1, 5, y), "v": data(1, u, z)}
        for x, y, z, u in ((8, 8, 8, 5), (8, 6, 8, 5), (8, 8, 6, 5), (7, 7, 7, 5), (8, 8, 8, 3))
    ]
    yield one_op("Attention", flat, calls, opset=23, q_num_heads=2, kv_num_heads=2, label="3 axes")
    weights = {"w": data(1, 8, 3), "r": data(1, 8, 2)}
    yield one_op("LSTM", {"x": [2, "b", "i"]}, [{"x": data(2, 1, i)} for i in (3, 2, 4)], weights, hidden_size=2)
    yield one_op(
        "LSTM",
        {"x": [2, 2, 3], "l": ["b"]},
        [{"x": data(2, 2, 3), "l": ints(*v, dtype="int32")} for v in ((2, 1), (2,), (2, 2, 2), (9, -1))],
        weights,
        order=["x", "w", "r", "", "l"],
        hidden_size=2,
        label="lengths",
    )
    yield one_op(
        "LSTM",
        {"x": [2, 2, 3], "h": [1, "b", "k"], "c": [1, "d", "e"]},
        [
            {"x": data(2, 2, 3), "h": data(1, *h), "c": data(1, *c)}
            for h, c in (((2, 2), (2, 2)), ((1, 2), (2, 2)), ((2, 2), (1, 2)), ((2, 1), (2, 2)), ((3, 2), (2, 2)))
        ],
        weights,
        order=["x", "w", "r", "", "", "h", "c"],
        hidden_size=2,
        label="states",
    )
    for op, gates in (("GRU", 3), ("RNN", 1)):
        yield one_op(
            op,
            {"x": [2, "b", "i"], "w": [1, "g", 3], "r": [1, "h", 2]},
            [
                {"x": data(2, 1, i), "w": data(1, g, 3), "r": data(1, h, 2)}
                for i, g, h in (
                    (3, 2 * gates, 2 * gates),
                    (4, 2 * gates, 2 * gates),
                    (3, 2 * gates + 1, 2 * gates),
                    (3, 2 * gates, 2 * gates + 2),
                )
            ],
            hidden_size=2,
        )


def places(rng: np.random.Generator) -> Iterator[Attack]:
    """Ops that read or write at places, and count them."""
    for k in (0, 1, 3, 5, -1, HUGE, LARGEST):
        yield one_op(
            "TopK",
            {"x": ["n"]},
            [{"x": data(n)} for n in (3, 5, 0, 1)],
            {"k": ints(k)},
            outputs=2,
            results=[TensorProto.FLOAT, TensorProto.INT64],
            label=f"k = {k}",
        )
    yield one_op(
        "TopK",
        {"x": ["n"], "k": [1]},
        [{"x": data(n), "k": ints(k)} for n in (3, 0) for k in (0, 1, 3, 4, -1, HUGE, LARGEST, LEAST)],
        outputs=2,
        results=[TensorProto.FLOAT, TensorProto.INT64],
    )
    yield one_op(
        "TopK",
        {"x": [2, "n"]},
        [{"x": data(2, n)} for n in (3, 2, 1)],
        {"k": ints(2)},
        outputs=2,
        results=[TensorProto.FLOAT, TensorProto.INT64],
        label="rows",
    )
    for op in ("ArgMax", "ArgMin"):
        yield one_op(
            op,
            {"x": ["n", "m"]},
            [{"x": data(*s)} for s in ((2, 3), (0, 3), (2, 0), (0, 0))],
            result=TensorProto.INT64,
            axis=0,
        )
        yield one_op(
            op,
            {"x": ["n", "m"]},
            [{"x": data(*s, dtype="int32")} for s in ((2, 3), (0, 3), (2, 0))],
            result=TensorProto.INT64,
            axis=1,
            label="integers",
            select_last_index=1,
        )
    for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceLogSumExp", "ReduceL2"):
        axes = {"a": ints(0)}
        yield one_op(op, {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3), (2, 0), (0, 0))], axes)
    yield one_op(
        "Gather",
        {"x": ["n", 2], "i": ["k"]},
        [{"x": data(n, 2), "i": ints(*i)} for n in (3, 0) for i in ((0,), (), (2, -1))],
    )
    yield one_op(
        "GatherElements",
        {"x": ["n", 2], "i": ["k", "m"]},
        [{"x": data(3, 2), "i": np.zeros(s, "int64")} for s in ((3, 2), (1, 2), (4, 2), (3, 3), (3, 1), (0, 2))],
    )
    yield one_op(
        "GatherND",
        {"x": ["n", "m"], "i": ["k", 2]},
        [{"x": data(*s), "i": np.zeros((k, 2), "int64")} for s in ((2, 3), (0, 3), (2, 0)) for k in (1, 0)],
    )
    yield one_op(
        "GatherND",
        {"x": ["b", "m"], "i": ["c", 1]},
        [{"x": data(b, 3), "i": np.zeros((c, 1), "int64")} for b, c in ((2, 2), (2, 3), (3, 2), (1, 2))],
        batch_dims=1,
        label="batches",
    )
    updates = [
        ((3, 2), (2, 2), (2, 2)),
        ((3, 2), (2, 2), (1, 2)),
        ((3, 2), (1, 2), (2, 2)),
        ((3, 2), (4, 2), (4, 2)),
        ((3, 2), (1, 3), (1, 3)),
    ]
    yield one_op(
        "ScatterElements",
        {"x": ["n", "m"], "i": ["a", "b"], "u": ["c", "d"]},
        [{"x": data(*x), "i": np.zeros(i, "int64"), "u": data(*u)} for x, i, u in updates],
    )
    updates = [
        ((3, 2), (2, 1), (2, 2)),
        ((3, 2), (2, 1), (1, 2)),
        ((3, 2), (2, 1), (2, 3)),
        ((3, 2), (2, 1), (2, 1)),
        ((3, 2), (0, 1), (0, 2)),
    ]
    yield one_op(
        "ScatterND",
        {"x": ["n", "m"], "i": ["a", 1], "u": ["c", "d"]},
        [{"x": data(*x), "i": np.zeros(i, "int64"), "u": data(*u)} for x, i, u in updates],
    )
    values = ints(0, 1)
    yield one_op(
        "OneHot",
        {"i": ["n"], "d": []},
        [{"i": ints(0, 1), "d": scalar(d)} for d in (3, 1, 0, -1, HUGE * 2, LARGEST, LEAST)],
        {"v": values},
        result=TensorProto.INT64,
    )
    for depth in (0, -1, 2**40):
        yield one_op(
            "OneHot",
            {"i": ["n"]},
            [{"i": ints(0, 1)}],
            {"d": scalar(depth), "v": values},
            result=TensorProto.INT64,
            label=f"depth {depth}",
        )
    yield one_op(
        "OneHot",
        {"i": ["n"], "v": ["k"]},
        [{"i": ints(0, 1), "v": data(k)} for k in (2, 1, 3, 0)],
        {"d": scalar(3)},
        order=["i", "d", "v"],
        label="values",
    )
    yield one_op("EyeLike", {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3), (3, 3))])
    yield one_op("NonZero", {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3))], result=TensorProto.INT64)
    yield one_op("Unique", {"x": ["n"]}, [{"x": data(n)} for n in (3, 1, 0)])
    yield one_op(
        "Compress",
        {"x": ["n", 2], "c": ["k"]},
        [{"x": data(n, 2), "c": np.ones(k, bool)} for n in (3, 0) for k in (3, 2, 4, 0, 9)],
        axis=0,
    )
    yield one_op(
        "Compress",
        {"x": ["n", 2], "c": ["k"]},
        [{"x": data(3, 2), "c": np.ones(k, bool)} for k in (3, 6, 7, 0)],
        label="flat",
    )
    boxes = {"b": [1, "n", 4], "s": [1, 1, "m"]}
    yield one_op(
        "NonMaxSuppression",
        boxes,
        [{"b": data(1, n, 4), "s": data(1, 1, m)} for n, m in ((3, 3), (3, 2), (2, 3), (0, 0))],
        {"k": ints(2)},
        result=TensorProto.INT64,
    )
    yield one_op(
        "NonMaxSuppression",
        {"b": [1, 3, 4], "s": [1, 1, 3], "k": [1]},
        [{"b": data(1, 3, 4), "s": data(1, 1, 3), "k": ints(k)} for k in (0, 1, 3, 9, -1, LARGEST, LEAST)],
        result=TensorProto.INT64,
        label="limit",
    )
    yield one_op(
        "RoiAlign",
        {"x": [1, 1, 4, 4], "r": ["n", 4], "b": ["m"]},
        [{"x": data(1, 1, 4, 4), "r": data(n, 4), "b": ints(*[0] * m)} for n, m in ((2, 2), (2, 1), (1, 2), (0, 0))],
        output_height=2,
        output_width=2,
    )
    yield one_op(
        "ReverseSequence",
        {"x": ["t", "b"], "l": ["n"]},
        [{"x": data(t, b), "l": ints(*[1] * n)} for t, b, n in ((3, 2, 2), (3, 2, 1), (3, 2, 3), (0, 2, 2))]
        + [{"x": data(3, 2), "l": ints(*v)} for v in ((4, 1), (0, 1), (-1, 2), (LARGEST, LEAST))],
    )
    for op in ("CumSum",):
        yield one_op(
            op, {"x": ["n"], "a": []}, [{"x": data(n), "a": scalar(a)} for n in (3, 0) for a in (0, -1, 1, -2)]
        )
        yield one_op(op, {"x": ["n", 2], "a": []}, [{"x": data(3, 2), "a": scalar(a)} for a in (0, 1, -1, 2)])
    yield one_op(
        "TensorScatter",
        {"x": ["b", "s", 2], "u": ["c", "t", 2], "i": ["k"]},
        [
            {"x": data(b, s, 2), "u": data(c, t, 2), "i": ints(*[0] * k)}
            for b, s, c, t, k in ((1, 4, 1, 2, 1), (1, 4, 2, 2, 1), (2, 4, 1, 2, 2), (1, 4, 1, 5, 1), (2, 4, 2, 2, 1))
        ],
        opset=24,
    )
    yield one_op(
        "MaxUnpool",
        {"x": [1, 1, 2, 2], "i": [1, 1, "h", "w"]},
        [{"x": data(1, 1, 2, 2), "i": np.zeros((1, 1, *s), "int64")} for s in ((2, 2), (1, 2), (3, 2))],
        kernel_shape=[2, 2],
        strides=[2, 2],
    )


def images(rng: np.random.Generator) -> Iterator[Attack]:
    """Resize and its kin, GridSample, windows and transforms."""
    sizes = [
        (1, 1, 4, 4),
        (1, 1, 8, 2),
        (1, 1, 0, 4),
        (1, 1, -1, 4),
        (1, 1, HUGE, HUGE),
        (1, 1, LARGEST, 1),
        (2, 1, 4, 4),
        (1, 1, 2, 2),
    ]
    for mode in ("nearest", "linear", "cubic"):
        yield one_op(
            "Resize",
            {"x": [1, 1, 2, 2], "z": [4]},
            [{"x": data(1, 1, 2, 2), "z": ints(*z)} for z in sizes],
            order=["x", "", "", "z"],
            label=f"sizes {mode}",
            mode=mode,
        )
        yield one_op(
            "Resize",
            {"x": [1, 1, "h", "w"]},
            [{"x": data(1, 1, h, w)} for h, w in ((2, 2), (4, 4), (1, 3), (0, 2))],
            {"z": ints(1, 1, 4, 4)},
            order=["x", "", "", "z"],
            label=f"n to 4 {mode}",
            mode=mode,
        )
    scales = [
        (1, 1, 2, 2),
        (1, 1, 0.5, 3),
        (1, 1, 0, 1),
        (1, 1, -1, 1),
        (1, 1, 1e9, 1e9),
        (1, 1, np.nan, 1),
        (1, 1, np.inf, 1),
    ]
    for mode in ("nearest", "linear"):
        yield one_op(
            "Resize",
            {"x": [1, 1, 2, 2], "f": [4]},
            [{"x": data(1, 1, 2, 2), "f": np.array(f, "float32")} for f in scales],
            order=["x", "", "f"],
            label=f"scales {mode}",
            mode=mode,
        )
        yield one_op(
            "Resize",
            {"x": [1, 1, "h", "w"]},
            [{"x": data(1, 1, h, w)} for h, w in ((2, 2), (4, 4), (1, 3), (0, 2))],
            {"f": np.array([1, 1, 2, 2], "float32")},
            order=["x", "", "f"],
            label=f"doubled {mode}",
            mode=mode,
        )
    for scale in scales[2:]:
        yield one_op(
            "Resize",
            {"x": [1, 1, "h", "w"]},
            [{"x": data(1, 1, 2, 2)}],
            {"f": np.array(scale, "float32")},
            order=["x", "", "f"],
            label=f"static scales {scale}",
        )
    yield one_op(
        "Resize",
        {"x": [1, 1, 2, 2]},
        [{"x": data(1, 1, 2, 2)}],
        {"z": ints(1, 1, HUGE, HUGE)},
        order=["x", "", "", "z"],
        label="static huge",
    )
    yield one_op(
        "Upsample",
        {"x": [1, 1, "h", "w"], "f": [4]},
        [{"x": data(1, 1, 2, 2), "f": np.array(f, "float32")} for f in scales],
        opset=9,
    )
    yield one_op(
        "GridSample",
        {"x": ["n", 1, 3, 3], "g": ["m", "h", "w", "k"]},
        [
            {"x": data(n, 1, 3, 3), "g": np.zeros(g, "float32")}
            for n, g in ((1, (1, 2, 2, 2)), (2, (1, 2, 2, 2)), (1, (2, 2, 2, 2)), (1, (1, 2, 2, 3)), (1, (1, 0, 2, 2)))
        ],
    )
    yield one_op(
        "AffineGrid",
        {"t": ["n", 2, 3], "z": [4]},
        [
            {"t": data(n, 2, 3), "z": ints(*z)}
            for n, z in ((1, (1, 1, 2, 2)), (2, (1, 1, 2, 2)), (1, (1, 1, -1, 2)), (1, (1, 1, HUGE, HUGE)))
        ],
        opset=20,
    )
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        yield one_op(op, {"n": []}, [{"n": scalar(n)} for n in (4, 1, 0, -1, LARGEST, 2**40)])
    yield one_op(
        "DFT",
        {"x": [1, "n", 1], "l": []},
        [{"x": data(1, n, 1), "l": scalar(k)} for n in (4, 0) for k in (4, 2, 6, 0, -1, LARGEST)],
        opset=20,
    )
    yield one_op("DFT", {"x": [1, "n", 1]}, [{"x": data(1, n, 1)} for n in (4, 1, 0, 3)], opset=20)
    yield one_op(
        "STFT",
        {"x": [1, "n", 1], "w": ["k"]},
        [{"x": data(1, n, 1), "w": data(k)} for n, k in ((8, 4), (4, 4), (3, 4), (8, 3))],
        {"s": scalar(2)},
        order=["x", "s", "w"],
    )
    yield one_op("Dropout", {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3))])
    yield one_op("Bernoulli", {"x": ["n"]}, [{"x": data(n) * 0} for n in (3, 0)])
    yield one_op(
        "Where",
        {"c": ["a"], "x": ["b"], "z": ["d"]},
        [
            {"c": np.ones(a, bool), "x": data(b), "z": data(d)}
            for a, b, d in ((3, 3, 3), (1, 3, 1), (3, 2, 3), (3, 1, 0), (0, 1, 1))
        ],
    )
    for op in ("Add", "Pow", "Max", "Equal"):
        kind = TensorProto.BOOL if op == "Equal" else TensorProto.FLOAT
        yield one_op(
            op,
            {"x": ["a", 2], "z": ["b", 2]},
            [{"x": data(a, 2), "z": data(b, 2)} for a, b in ((2, 2), (1, 3), (3, 1), (2, 3), (0, 1), (0, 2), (3, 2))],
            result=kind,
        )
    yield (
        one_op(
            "SequenceConstruct",
            {"x": ["a"]},
            [{"x": data(2)}],
            result=TensorProto.FLOAT,
            label="skipped",
        )
        if False
        else one_op("Identity", {"x": ["a"]}, [{"x": data(n)} for n in (0, 2)])
    )


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


FAMILIES = (shapes, ranges, cuts, products, norms, attention, places, images, chains)
"""The generators of attacks, each over a kind of op."""


def attacks(seed: int = 0) -> Iterator[Attack]:
    """All attacks; the random ones follow from `seed`."""
    for family in FAMILIES:
        yield from family(np.random.default_rng(seed))
