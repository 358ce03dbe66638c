"""Joined sizes keep few terms, however many nodes pass them on."""

import numpy as np
import onnx
import pytest
import tvm
from onnx import parser
from tvm import relax

import relax_hetero as rh
from relax_hetero.frontend import joined_sizes
from relax_hetero.transform.ir.named_sizes import MAX_TERMS
from seeds import fresh_rng

ort = pytest.importorskip("onnxruntime")

HEAD = '<ir_version: 8, opset_import: ["" : 17]>'
NUMBERS = """int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] end = {9223372036854775807},
    int64[1] rest = {-1}, float no = {-9.0}, float half = {0.5}"""
BLOCK = """
    shape_I = Shape(PREVIOUS)  batch_I = Gather(shape_I, zero)  tokens_I = Gather(shape_I, one)
    heads_I = Concat<axis = 0>(batch_I, tokens_I, two, rest)
    split_I = Reshape(PREVIOUS, heads_I)
    queries_I = Transpose<perm = [0, 2, 1, 3]>(split_I)  keys_I = Transpose<perm = [0, 2, 3, 1]>(split_I)
    scores_I = MatMul(queries_I, keys_I)
    column_I = Unsqueeze(mask, one)  whole_I = Unsqueeze(column_I, one)
    square_I = Concat<axis = 0>(batch_I, one, tokens_I, tokens_I)
    seen_I = Expand(whole_I, square_I)  bias_I = Where(seen_I, half, no)
    masked_I = Add(scores_I, bias_I)  weights_I = Softmax<axis = -1>(masked_I)
    mixed_I = MatMul(weights_I, queries_I)  back_I = Transpose<perm = [0, 2, 1, 3]>(mixed_I)
    joined_I = Concat<axis = 0>(batch_I, tokens_I, rest)
    flat_I = Reshape(back_I, joined_I)  h_I = Add(flat_I, PREVIOUS)"""
CHAINS = {
    "joins of sums": """t_I = Slice(PREVIOUS, one, end, one)  u_I = Concat<axis = 1>(t_I, first)  h_I = Add(u_I, y)""",
    "joins of maxima": """s_I = Shape(PREVIOUS)  t_I = Shape(y)  w_I = Max(s_I, t_I)  z_I = ConstantOfShape(w_I)
        h_I = Add(z_I, PREVIOUS)""",
    "quotients": """s_I = Shape(PREVIOUS)  t_I = Shape(y)  m_I = Min(s_I, t_I)  a_I = Add(m_I, one)  v_I = Max(a_I, t_I)
        w_I = Mul(v_I, s_I)  d_I = Div(w_I, a_I)  z_I = ConstantOfShape(d_I)  h_I = Relu(z_I)""",
    "slices to computed ends": """s_I = Shape(PREVIOUS)  e_I = Gather(s_I, one)  l_I = Sub(e_I, one)
        p_I = Max(l_I, one)  t_I = Slice(PREVIOUS, zero, p_I, one)  h_I = Add(t_I, y)""",
}


def chain(block: str, depth: int, inputs: str, start: str, before: str = "") -> onnx.ModelProto:
    """A model of `depth` blocks, each of which reads the one before it."""
    names = [start, *(f"h_{i}" for i in range(depth))]
    nodes = [block.replace("PREVIOUS", names[i]).replace("_I", f"_{i}") for i in range(depth)]
    text = f"{before} {' '.join(nodes)} out = Identity({names[-1]})"
    return parser.parse_model(f"{HEAD} g ({inputs}) => (float[A, B] out) <{NUMBERS}> {{ {text} }}".replace(
        "[A, B]", "[A, B, 4]" if "mask" in inputs else "[A, B]"))  # fmt: skip


def attention(depth: int) -> onnx.ModelProto:
    return chain(
        BLOCK,
        depth,
        "float[batch, tokens, 4] x, bool[masks, places] mask, float[8, 4] table",
        "begin",
        """s = Shape(x)  n = Gather(s, one)  rows = Slice(table, zero, n, zero)  row = Unsqueeze(rows, zero)
           all = Expand(row, s)  begin = Add(x, all)""",
    )


def terms(size: object) -> int:
    parts = [getattr(size, name, None) for name in ("a", "b", "condition", "true_value", "false_value", "value")]
    return 1 + sum(terms(part) for part in parts if isinstance(part, tvm.ir.Expr))


def most_terms(mod: tvm.IRModule) -> int:
    """The terms of the longest size of a variable of "main"."""
    shapes = [getattr(binding.var.ty, "shape", None) for block in mod["main"].body.blocks for binding in block.bindings]
    return max(terms(dim) for shape in shapes if isinstance(shape, relax.ShapeExpr) for dim in shape.values)


def compare(model: onnx.ModelProto, feeds: list[dict[str, np.ndarray]]) -> list[str]:
    """Compare calls with ONNX Runtime's, which must refuse the same ones; returns the texts of the errors."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    errors = []
    for arrays in feeds:
        try:
            (expected,) = session.run(None, arrays)
        except Exception:  # onnxruntime's own kinds, all of them refusals
            with pytest.raises(rh.HeteroError) as error:
                main(*arrays.values())
            errors.append(str(error.value))
            continue
        np.testing.assert_allclose(main(*arrays.values()).numpy(), expected, rtol=1e-4, atol=1e-5)
    return errors


def test_sizes_of_a_deep_model_are_those_of_a_shallow_one(monkeypatch):
    visits, totals = [], {}
    analyzer_for = joined_sizes.analyzer_for

    def counted(*values, **options):
        visits.append(sum(map(terms, values)))
        return analyzer_for(*values, **options)

    monkeypatch.setattr(joined_sizes, "analyzer_for", counted)
    for depth in (2, 4, 8):
        visits.clear()
        mod = rh.from_onnx(attention(depth))
        assert most_terms(mod) <= 9, depth  # of two names: max(a, b) * min(min(a, b), 1)
        assert list(map(str, mod["main"].ret_ty.shape.values[:2])) == ["batch", "tokens"]
        bounds = mod["main"].attrs["tir_var_upper_bound"]
        assert {str(name): int(bound) for name, bound in bounds.items()} == {"tokens": 8}
        totals[depth] = sum(visits)
    assert totals[8] - totals[4] <= 2 * (totals[4] - totals[2])


def test_a_model_of_attention_is_computed_as_by_onnxruntime():
    rng = fresh_rng()
    table, sizes = rng.random((8, 4), "float32"), [(1, 1, 1, 1), (2, 5, 2, 5), (3, 1, 1, 1), (2, 5, 1, 5), (2, 4, 2, 1)]
    feeds = [
        {"x": rng.random((b, n, 4), "float32"), "mask": rng.random((m, p)) < 0.6, "table": table}
        for b, n, m, p in [*sizes, (1, 8, 1, 8), (2, 5, 2, 4), (1, 9, 1, 9)]
    ]
    mismatch, too_long = compare(attention(2), feeds)
    assert "(places = 4, tokens = 5); places is dimension 1 of argument 'mask', tokens is dimension 1 of " in mismatch
    assert "tokens" in too_long and "8" in too_long


@pytest.mark.parametrize("kind", CHAINS)
def test_chains_of_sizes(kind):
    def model(depth: int) -> onnx.ModelProto:
        return chain(CHAINS[kind], depth, "float[a, b] x, float[c, d] y", "x", "first = Slice(y, zero, one, one)")

    for depth in (3, 9):
        assert most_terms(rh.from_onnx(model(depth))) <= MAX_TERMS
    rng = fresh_rng()
    sizes = [(2, 3, 2, 3), (1, 3, 2, 3), (1, 1, 1, 1), (2, 5, 2, 3), (3, 4, 1, 1)]
    compare(model(3), [{"x": rng.random(size[:2], "float32"), "y": rng.random(size[2:], "float32")} for size in sizes])


def test_bounds_of_sums_of_branches_and_of_sizes_that_are_found():
    """Slicing a table by a sum bounds the sum; in a branch, a bound holds for calls that take the branch."""
    model = parser.parse_model(f"""{HEAD} g (float[past, 2] p, float[new, 2] x, float[9] table) => (float[A, 2] y)
        <{NUMBERS}> {{
            all = Concat<axis = 0>(p, x)  s = Shape(all)  n = Gather(s, zero)
            rows = Slice(table, zero, n)  column = Unsqueeze(rows, one)  y = Add(all, column) }}""")
    rng = fresh_rng()
    sizes = [(1, 1), (4, 5), (0, 3), (4, 6)]
    table = rng.random(9, "float32")
    pairs = [(rng.random((a, 2), "float32"), rng.random((b, 2), "float32")) for a, b in sizes]
    (error,) = compare(model, [{"p": p, "x": x, "table": table} for p, x in pairs])
    assert "Add node 'Add_5': size past + new is at most 9" in error
    assert "(past = 4, new = 6); past is dimension 0 of argument 'p', new is dimension 0 of argument 'x'" in error
    branch = parser.parse_model(f"""{HEAD} g (float[n] x, bool is_short, float[3] table) => (float[n] y) <{NUMBERS}> {{
        y = If(is_short) <
            then_branch = a () => (float[n] t) {{ s = Shape(x) rows = Slice(table, zero, s) t = Add(x, rows) }},
            else_branch = b () => (float[n] e) {{ e = Neg(x) }}> }}""")
    x = rng.random(4, "float32")
    calls = [(x[:2], True), (x[:2], False), (x, True), (x, False)]
    feeds = [{"x": part, "is_short": np.array(is_short), "table": table[:3]} for part, is_short in calls]
    assert "size n is at most 3" in compare(branch, feeds)[0]
    lookup = parser.parse_model(f"""{HEAD} g (float[n] x, float[3] table) => (float[m] y) <{NUMBERS}> {{
        places = NonZero(x)  flat = Squeeze(places, zero)  s = Shape(flat)  rows = Slice(table, zero, s)
        real = Cast<to = 1>(flat)  y = Add(real, rows) }}""")
    feeds = [{"x": np.array(values, "float32"), "table": table[:3]} for values in ([0, 1, 1], [1], [1, 1, 0, 1, 1])]
    assert "is at most 3" in compare(lookup, feeds)[0]
