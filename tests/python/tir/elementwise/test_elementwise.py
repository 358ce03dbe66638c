"""Elementwise expressions: what every op computes for every type, and kernels on every kind of storage."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import runtime, tirx

from relax_hetero.encoding import Expression, PackedLayout
from relax_hetero.encoding.functions import FUNCTIONS
from relax_hetero.encoding.problem import ElementwiseProblem, Operand
from relax_hetero.errors import EncodingError
from relax_hetero.tir.core.builder import Function
from relax_hetero.tir.elementwise.elementwise import elementwise_kernel
from relax_hetero.tir.elementwise.expression_code import emit
from seeds import fresh_rng
from tir.kernel_runs import NAMES, built, cpu_named, kernel, poisoned, stored

TILES = "pack<outer=[0, 1] inner=[0:8, 1:32]>"
SMALL_TILES = "pack<outer=[0, 1] inner=[0:4, 1:3]>"
COLUMNS = "pack<outer=[1, 0] inner=[1:32]>"
ROWS = "pack<outer=[0, 1] inner=[0:8]>"
IDENTITY = "identity<2>"
SHAPE = (37, 70)


def _run(text, operands, layout, target, folder, dynamic=False):
    """`operands`: (array, index map), stored as the result where the map is whole and the array is marked so."""
    layout, expression = PackedLayout.parse(layout), Expression.parse(text)
    shape = operands[0][0].shape
    names = tuple(f"d{i}" for i in range(len(shape)))

    def dims(index_map, extents):
        return tuple(f"s{n[1:]}" if dynamic and n != "1" else e for n, e in zip(index_map, extents, strict=True))

    described, args = [], []
    for array, index_map, *plain in operands:
        alike = index_map == names and not plain
        own = layout if alike else PackedLayout.identity(array.ndim)
        described.append(Operand(dims(index_map, array.shape), str(array.dtype), index_map, own))
        args.append(runtime.tensor(stored(array, layout, 0xFF if array.dtype.itemsize > 1 else 0) if alike else array))
    dtype = expression.dtype([operand.dtype for operand in described])
    problem = ElementwiseProblem(expression, tuple(described), Operand(dims(names, shape), dtype, names, layout))
    out = poisoned(layout.packed_shape(shape), dtype)
    kernel(elementwise_kernel(problem, cpu_named(target)), target, folder)(*args, out)
    return layout.unpack(out.numpy(), shape)


def _all_flat(texts, arrays, target, folder):
    """Results of several expressions on rows, compiled at once."""
    functions, types = {}, {}
    for i, text in enumerate(texts):
        expression = Expression.parse(text)
        flat = [Operand((a.size,), str(a.dtype), ("d0",), PackedLayout.identity(1)) for a in arrays]
        flat = flat[: expression.num_operands]
        types[text] = expression.dtype([operand.dtype for operand in flat])
        result = Operand(flat[0].shape, types[text], ("d0",), PackedLayout.identity(1))
        functions[f"kernel{i}"] = elementwise_kernel(
            ElementwiseProblem(expression, tuple(flat), result), cpu_named(target)
        )
    module, results = built(functions, target, folder), {}
    for i, text in enumerate(texts):
        out = poisoned(arrays[0].shape, types[text])
        operands = arrays[: Expression.parse(text).num_operands]
        module[f"kernel{i}"](*[runtime.tensor(array) for array in operands], out)
        results[text] = out.numpy()
    return results


def _flat(text, arrays, target, folder):
    return _run(text, [(array, ("d0",)) for array in arrays], "identity<1>", target, folder)


# Reference in numpy for inputs of any float type; transcendental ones have tests of their own.
FLOAT_OPS = {
    "add(x0, x1)": np.add,
    "subtract(x0, x1)": np.subtract,
    "multiply(x0, x1)": np.multiply,
    "divide(x0, x1)": np.divide,
    "maximum(x0, x1)": np.maximum,
    "minimum(x0, x1)": np.minimum,
    "maximum(x0, 0.5)": lambda a, b: np.maximum(a, np.float32(0.5)),
    "relu(x0)": lambda a, b: np.maximum(a, 0),
    "square(x0)": lambda a, b: a * a,
    "sqrt(x0)": lambda a, b: np.sqrt(a),
    "abs(x0)": lambda a, b: np.abs(a),
    "negative(x0)": lambda a, b: -a,
    "round(x0)": lambda a, b: np.round(a),
    "floor(x0)": lambda a, b: np.floor(a),
    "ceil(x0)": lambda a, b: np.ceil(a),
    "softsign(x0)": lambda a, b: a / (1 + np.abs(a)),
    "leaky_relu(x0, 0.1)": lambda a, b: np.where(a > 0, a, a * np.float32(0.1)),
    "clip(x0, -0.5, 1.25)": lambda a, b: np.clip(a, -0.5, 1.25),
    "clip(x0, -inf, 1.25)": lambda a, b: np.minimum(a, 1.25),
    "add(multiply(x0, x0), square(x1))": lambda a, b: a * a + b * b,
}
TRANSCENDENTAL = {"exp", "log", "tanh", "erf", "sigmoid", "silu", "gelu", "gelu_tanh", "mish", "rsqrt"}


def test_every_op_is_tested():
    tested = {term.op for text in FLOAT_OPS for term in Expression.parse(text).terms()}
    functions = {name for name, function in FUNCTIONS.items() if function.op}
    assert functions - tested - TRANSCENDENTAL == {"cast", "where"}


def _pair(dtype):
    rng = np.random.default_rng(5)
    a, b = (rng.normal(size=77).astype("float32") * 4 for _ in range(2))
    a[:8] = [0.5, -0.5, 1.5, 2.5, -2.5, 0.0, -0.0, np.inf]
    a[8], b[9], b[10] = np.nan, np.nan, -np.inf
    return a.astype(dtype), b.astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_ops_of_floats(dtype, tmp_path):
    a, b = _pair(dtype)
    actual = _all_flat(FLOAT_OPS, [a, b], NAMES[0], tmp_path)
    for text, reference in FLOAT_OPS.items():
        with np.errstate(all="ignore"):
            expected = reference(a.astype("float32"), b.astype("float32")).astype("float32").astype(dtype)
        assert str(actual[text].dtype) == dtype
        tolerance = 2e-7 if text.startswith("add(mul") and dtype == "float32" else 0  # a fused multiplication
        np.testing.assert_allclose(
            actual[text].astype("float32"), expected.astype("float32"), rtol=tolerance, err_msg=text
        )


def test_a_choice_by_bytes_and_numbers(tmp_path):
    a, b = _pair("float32")
    condition = fresh_rng().integers(0, 2, a.size).astype("int8") * 3
    for name in sorted({NAMES[0], "c"}):
        actual = _flat("where(x2, where(x2, x0, x1), -1.5)", [a, b, condition], name, tmp_path)
        np.testing.assert_array_equal(actual, np.where(condition != 0, a, np.float32(-1.5)))


def test_ops_of_floats_on_c(tmp_path):
    """One expression of all that the C compiler has to get right, numbers of more than 7 digits among it."""
    a, b = _pair("float32")
    text = "add(multiply(round(x0), 1.00000012), clip(maximum(negative(x0), abs(x1)), 0.1, 16777217.0))"
    actual = _flat(text, [a, b], "c", tmp_path)
    expected = np.round(a) * np.float32(1.00000012) + np.clip(np.maximum(-a, np.abs(b)), np.float32(0.1), 16777217)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("target", sorted({NAMES[0], "c"}))
def test_transcendental_ops_are_wired(target, tmp_path):
    x = np.linspace(0.1, 3, 40, dtype="float32")
    actual = _flat("add(add(exp(x0), log(x0)), multiply(sigmoid(x0), rsqrt(tanh(x0))))", [x], target, tmp_path)
    wide = x.astype("float64")
    expected = np.exp(wide) + np.log(wide) + 1 / (1 + np.exp(-wide)) / np.sqrt(np.tanh(wide))
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


INT_OPS = {
    "add(x0, x1)": lambda a, b: a + b,
    "subtract(x0, x1)": lambda a, b: a - b,
    "multiply(x0, x1)": lambda a, b: a * b,
    "maximum(x0, x1)": np.maximum,
    "minimum(x0, x1)": np.minimum,
    "relu(x0)": lambda a, b: np.maximum(a, 0),
    "clip(x0, -7, 9)": lambda a, b: np.clip(a, -7, 9),
    "round(x0)": lambda a, b: a,
}


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_ops_of_integers(dtype, tmp_path):
    rng = np.random.default_rng(6)
    a, b = (rng.integers(-128, 128, 77).astype(dtype) for _ in range(2))
    actual = _all_flat(INT_OPS, [a, b], NAMES[0], tmp_path)
    for text, reference in INT_OPS.items():
        np.testing.assert_array_equal(actual[text], reference(a, b).astype(dtype), err_msg=text)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32"])
@pytest.mark.parametrize("target", sorted({NAMES[0], "c"}))
def test_integer_division_truncates_and_never_traps(dtype, target, tmp_path):
    limits = np.iinfo(dtype)
    values = np.array([limits.min, limits.max, 7, limits.min // 2 + 1, 0], dtype)
    divisors = np.array([0, limits.max if dtype == "uint8" else -1, 1, 2, 3], dtype)
    a, b = (grid.reshape(-1) for grid in np.meshgrid(values, divisors))
    actual = _flat("divide(x0, x1)", [a, b], target, tmp_path)
    safe = (b != 0) & ~((a == limits.min) & (b == divisors[1]) & (dtype != "uint8"))
    expected = np.trunc(a[safe].astype("float64") / b[safe]).astype(dtype)
    np.testing.assert_array_equal(actual[safe], expected)
    np.testing.assert_array_equal(actual[b == 0], a[b == 0])


CASTS = [
    ("float32", "int8", [-3.9, -0.5, 0.5, 3.9, 127.9, -128.0]),
    ("float32", "uint8", [0.9, 3.9, 255.0]),
    ("float32", "bool", [0.0, -0.0, 0.1, -3.0]),
    ("float32", "float16", [1.0005, 65504.0, 1e-7, np.nan, np.inf]),
    ("float32", "bfloat16", [1.00390625, 1.01171875, 3e38, -1e-39, np.nan, np.inf]),
    ("bfloat16", "float32", [1.0078125, np.nan, -np.inf]),
    ("bfloat16", "int32", [-3.5, 300.0]),
    ("int8", "float16", [-128, 5]),
    ("int8", "bfloat16", [-128, 5]),
    ("int32", "int8", [300, -129, 5]),
    ("bool", "float32", [True, False]),
    ("float64", "float32", [1 / 3, 1e300]),
]


@pytest.mark.parametrize(("source", "to", "values"), CASTS)
def test_casts(source, to, values, tmp_path):
    x = np.resize(np.array(values, source), 40)
    actual = _flat(f"cast(x0, '{to}')", [x], NAMES[0], tmp_path)
    with np.errstate(all="ignore"):
        expected = x.astype(to)
    assert str(actual.dtype) == to
    np.testing.assert_array_equal(actual.astype("float64"), expected.astype("float64"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_rounds_also_where_it_is_cast_back(dtype, tmp_path):
    x = np.random.default_rng(7).normal(size=40).astype("float32")
    actual = _flat(f"cast(cast(x0, '{dtype}'), 'float32')", [x], NAMES[0], tmp_path)
    np.testing.assert_array_equal(actual, x.astype(dtype).astype("float32"))


def test_16_bit_floats_are_rounded_once(tmp_path):
    x = np.full(40, 256.0, ml_dtypes.bfloat16)
    actual = _flat("subtract(add(x0, 1.0), x0)", [x], NAMES[0], tmp_path)
    assert (actual.astype("float32") == 1.0).all()  # op by op it is 0: 257 is not a bfloat16


def test_quantization(tmp_path):
    x = (np.random.default_rng(8).normal(size=77) * 50).astype("float32")
    actual = _flat("cast(clip(add(round(divide(x0, 0.75)), 3.0), 0, 255), 'uint8')", [x], NAMES[0], tmp_path)
    expected = np.clip(np.round(x / np.float32(0.75)) + 3, 0, 255).astype("uint8")
    np.testing.assert_array_equal(actual, expected)


# ---- storage ----


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("layout", [TILES, SMALL_TILES, COLUMNS, ROWS, IDENTITY])
def test_broadcast_on_packed_storage(layout, dynamic, tmp_path):
    """A bias, a column, a scalar, one stored alike and one row-major; padding of all that is packed holds NaN."""
    rng = np.random.default_rng(9)
    x, alike, plain = (rng.normal(size=SHAPE).astype("float32") for _ in range(3))
    bias, column = rng.normal(size=70).astype("float32"), rng.normal(size=(37, 1)).astype("float32")
    full = ("d0", "d1")
    operands = [
        (x, full),
        (bias, ("d1",)),
        (column, ("d0", "1")),
        (np.array(3, "float32"), ()),
        (alike, full),
        (plain, full, "row-major"),
    ]
    text = "add(add(multiply(add(x0, x1), x2), multiply(x3, x4)), x5)"
    actual = _run(text, operands, layout, NAMES[0], tmp_path, dynamic)
    np.testing.assert_allclose(actual, (x + bias) * column + 3 * alike + plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", NAMES[1:])
def test_broadcast_on_other_machines(target, tmp_path):
    x, bias = np.random.default_rng(10).normal(size=SHAPE).astype("float32"), np.arange(70, dtype="float32")
    layout = SMALL_TILES if target == "c" else TILES
    actual = _run("relu(add(x0, x1))", [(x, ("d0", "d1")), (bias, ("d1",))], layout, target, tmp_path)
    np.testing.assert_array_equal(actual, np.maximum(x + bias, 0))


@pytest.mark.parametrize("layout", [TILES, IDENTITY])
def test_bfloat16_on_packed_storage(layout, tmp_path):
    rng = np.random.default_rng(11)
    x, bias = rng.normal(size=SHAPE).astype("bfloat16"), rng.normal(size=70).astype("bfloat16")
    actual = _run("add(x0, x1)", [(x, ("d0", "d1")), (bias, ("d1",))], layout, NAMES[0], tmp_path)
    expected = (x.astype("float32") + bias.astype("float32")).astype("bfloat16")
    np.testing.assert_array_equal(actual.astype("float32"), expected.astype("float32"))


def test_division_by_the_zeros_of_padding(tmp_path):
    rng = np.random.default_rng(12)
    a = rng.integers(-128, 128, SHAPE).astype("int8")
    b = rng.choice([-7, -1, 1, 3], SHAPE).astype("int8")
    a[a == -128] = 5
    actual = _run("divide(x0, x1)", [(a, ("d0", "d1")), (b, ("d0", "d1"))], TILES, NAMES[0], tmp_path)
    np.testing.assert_array_equal(actual, np.trunc(a / b).astype("int8"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(0, 70), (37, 0)])
def test_no_elements(shape, dynamic, tmp_path):
    x, bias = np.zeros(shape, "float32"), np.ones(shape[1], "float32")
    actual = _run("add(x0, x1)", [(x, ("d0", "d1")), (bias, ("d1",))], TILES, NAMES[0], tmp_path, dynamic)
    assert actual.shape == shape


# ---- errors ----


@pytest.mark.parametrize(
    ("text", "dtypes", "message"),
    [
        ("add(x0, x1)", ["float32", "int8"], r"add in expression .* meets element types \['float32', 'int8'\]"),
        ("exp(x0)", ["int32"], "exp in expression .* does not exist for int32"),
        ("tanh(x0)", ["float64"], "tanh in expression .* does not exist for float64"),
        ("add(1.0, 2.0)", [], "has numbers only"),
        ("1.0", [], "is a number"),
    ],
)
def test_errors(text, dtypes, message):
    values = [tirx.Var(f"x{i}", dtype) for i, dtype in enumerate(dtypes)]
    with pytest.raises(EncodingError, match=message):
        _emit_alone(text, values, dtypes)


def _emit_alone(text, values, dtypes):
    with Function("alone") as function, function.body():
        emit(Expression.parse(text), values, dtypes, 1)


def test_an_operand_in_another_layout_is_refused():
    tiles, columns = PackedLayout.parse(TILES), PackedLayout.parse(COLUMNS)
    names = ("d0", "d1")
    operands = (Operand(SHAPE, "float32", names, tiles), Operand(SHAPE, "float32", names, columns))
    problem = ElementwiseProblem(Expression.parse("add(x0, x1)"), operands, operands[0])
    with pytest.raises(
        EncodingError, match=r"x1 is stored as pack<outer=\[1, 0\] .*; expected the result's pack<outer="
    ):
        elementwise_kernel(problem, cpu_named(NAMES[0]))
