"""Symbolic and pinned dimensions, element types of inputs."""

import pytest
from onnx import TensorProto, helper
from tvm import relax, sym, tirx

import relax_hetero as rh


def model_of(**inputs):
    """A model that returns its inputs; an input is its shape, or (element type, shape)."""
    infos = []
    for name, dims in inputs.items():
        elem_type, shape = dims if isinstance(dims, tuple) else (TensorProto.FLOAT, dims)
        infos.append(helper.make_tensor_value_info(name, elem_type, shape))
    graph = helper.make_graph([], "g", infos, infos)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def shapes_of(model, shapes=None):
    """Dimensions of the parameters: ints and texts of symbolic expressions."""
    params = rh.from_onnx(model, shapes=shapes)["main"].params
    dims = [[int(dim) if isinstance(dim, tirx.IntImm) else str(dim) for dim in param.ty.shape] for param in params]
    return dict(zip((param.name for param in params), dims, strict=True))


def test_dimensions_of_one_name_are_one_variable():
    model = model_of(ids=["batch", "seq"], mask=["batch", "seq"])
    first, second = rh.from_onnx(model)["main"].params
    assert [str(dim) for dim in first.ty.shape] == ["batch", "seq"]
    assert all(a.same_as(b) for a, b in zip(first.ty.shape, second.ty.shape, strict=True))


def test_nameless_dimensions_are_their_own():
    model = model_of(x=[None, 3], y=[None, "x_d0"])
    shapes = shapes_of(model)
    assert shapes["x"][0] == "x_d0"
    assert len({shapes["x"][0], *shapes["y"]}) == 3


def test_zero_is_a_size():
    assert shapes_of(model_of(x=[0, 2])) == {"x": [0, 2]}


def test_pinned_by_input():
    model = model_of(ids=["batch", "seq"], mask=["batch", "seq"])
    assert shapes_of(model, {"ids": [1, 128]}) == {"ids": [1, 128], "mask": [1, 128]}
    assert shapes_of(model, {"ids": (1, None)}) == {"ids": [1, "seq"], "mask": [1, "seq"]}


def test_pinned_by_name():
    model = model_of(ids=["batch", "seq"], mask=["batch", "seq"])
    assert shapes_of(model, {"seq": 128}) == {"ids": ["batch", 128], "mask": ["batch", 128]}
    assert shapes_of(model, {"batch": 1, "ids": [1, 2]}) == {"ids": [1, 2], "mask": [1, 2]}


def test_arithmetic_by_name():
    model = model_of(ids=["batch", "seq"], past=["batch", "past"], mask=["batch", "total"], more=["total + 1"])
    shapes = shapes_of(model, {"total": "past + seq"})
    assert shapes["mask"] == ["batch", "past + seq"]
    assert shapes["more"] == ["past + seq + T.int64(1)"]
    assert shapes_of(model, {"total": "past + seq", "past": 3, "seq": 2})["mask"] == ["batch", 5]
    assert shapes_of(model, {"total": "seq"})["mask"] == ["batch", "seq"]


def test_an_unknown_dimension_can_be_named():
    assert shapes_of(model_of(x=[None], y=["n"]), {"x": ["n"]}) == {"x": ["n"], "y": ["n"]}


def test_an_unknown_rank_can_be_given():
    model = model_of(x=None)
    assert shapes_of(model, {"x": [2, 3]}) == {"x": [2, 3]}
    assert rh.from_onnx(model)["main"].params[0].ty.ndim == -1


def test_names_that_are_expressions():
    model = model_of(x=["n", "m"], y=["n + 2*m", "m/2"])
    n, m, total, half = (dim for param in rh.from_onnx(model)["main"].params for dim in param.ty.shape)
    analyzer = sym.Analyzer()
    assert analyzer.can_prove_equal(total, n + 2 * m)
    assert analyzer.can_prove_equal(half, tirx.floordiv(m, tirx.IntImm("int64", 2)))
    assert shapes_of(model, {"n": 3, "m": 5}) == {"x": [3, 5], "y": [13, 2]}
    assert shapes_of(model, {"x": [3, 5]}) == {"x": [3, 5], "y": [13, 2]}


def test_an_expression_of_unknowns_is_a_variable_of_its_own():
    # Nothing at run time would give "past" alone.
    model = model_of(x=["past + 1"], y=["past + 1"])
    func = rh.from_onnx(model)["main"]
    assert all(isinstance(param.ty.shape[0], tirx.Var) for param in func.params)
    assert func.params[0].ty.shape[0].same_as(func.params[1].ty.shape[0])
    assert shapes_of(model, {"past": 4}) == {"x": [5], "y": [5]}
    assert shapes_of(model, {"past + 1": 4}) == {"x": [4], "y": [4]}


def test_odd_names_become_distinct_variables():
    names = shapes_of(model_of(x=["a-b.c", "a b c", "a_b_c"]))["x"]
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("elem_type", "dtype"),
    [
        (TensorProto.FLOAT, "float32"),
        (TensorProto.DOUBLE, "float64"),
        (TensorProto.FLOAT16, "float16"),
        (TensorProto.BFLOAT16, "bfloat16"),
        (TensorProto.INT64, "int64"),
        (TensorProto.UINT8, "uint8"),
        (TensorProto.BOOL, "bool"),
    ],
)
def test_element_types_are_the_models(elem_type, dtype):
    (param,) = rh.from_onnx(model_of(x=(elem_type, [2])))["main"].params
    assert str(param.ty.dtype) == dtype


@pytest.mark.parametrize("elem_type", [TensorProto.COMPLEX128, TensorProto.COMPLEX64])
def test_elements_without_a_tensor_type_are_refused(elem_type):
    with pytest.raises(rh.FrontendError, match=f"input 'x'.*{TensorProto.DataType.Name(elem_type)}"):
        rh.from_onnx(model_of(x=(elem_type, [2])))


def test_sequences_are_refused():
    info = helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [2])
    graph = helper.make_graph([helper.make_node("SequenceLength", ["s"], ["n"])], "g", [info],
                              [helper.make_tensor_value_info("n", TensorProto.INT64, [])])  # fmt: skip
    with pytest.raises(rh.FrontendError, match="input 's' is a sequence"):
        rh.from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"z": [1]}, "names 'z', which is neither an input nor a named dimension.*inputs: x, y.*batch, seq"),
        ({"z": 1}, "names 'z'"),
        ({"x": [1]}, "1 dimensions .* the model's input has 3"),
        ({"x": 4}, "give a list of its dimensions"),
        ({"seq": [4]}, "give one whole number"),
        ({"seq": "batch + n"}, r"shapes\['seq'\] is 'batch \+ n'; expected .* of other named dimensions .*: batch$"),
        ({"seq": "seq + 1"}, "expected a whole number, or arithmetic"),
        ({"seq": "4"}, "expected a whole number, or arithmetic"),
        ({"seq": "batch +"}, "expected a whole number, or arithmetic"),
        ({"seq": "batch", "batch": "seq"}, "expected a whole number, or arithmetic"),
        ({"seq": "batch", "y": [2, 3]}, "dimension 'seq' is given twice in shapes: 3 and 'batch'"),
        ({"x": "abc"}, "list of dimensions"),
        ({"x": [None, None, 8]}, r"shapes\['x'\]\[2\] is 8, but that dimension is 7"),
        ({"x": [None, "other", None]}, "is 'other', but that dimension is 'seq'"),
        ({"x": [1, 2, None], "batch": 3}, "dimension 'batch' is given two sizes"),
        ({"x": [1, 2, 7], "y": [1, 3]}, "dimension 'seq' is given two sizes"),
        ({"x": [-1, 2, 7]}, "whole number >= 0, got -1"),
        ({"x": [1.5, 2, 7]}, "whole number >= 0, got 1.5"),
        ({"batch": True}, "whole number >= 0, got True"),
        ({"batch": 10**20}, "no 64-bit size"),
        ([1, 2], "expected a mapping"),
        ("batch", "expected a mapping"),
        (5, "expected a mapping"),
    ],
)
def test_shapes_that_do_not_fit_are_errors(shapes, message):
    with pytest.raises(rh.FrontendError, match=message):
        rh.from_onnx(model_of(x=["batch", "seq", 7], y=["batch", "seq"]), shapes=shapes)


def test_an_expression_that_contradicts_its_names_is_an_error():
    model = model_of(x=["n"], y=["2*n"])
    with pytest.raises(rh.FrontendError, match=r"'2\*n' is given as 7 in shapes, but comes to 6"):
        rh.from_onnx(model, shapes={"n": 3, "y": [7]})
    with pytest.raises(rh.FrontendError, match="comes to -1"):
        rh.from_onnx(model_of(x=["n"], y=["n-4"]), shapes={"n": 3})


def test_symbolic_modules_are_well_formed():
    model = model_of(x=["n", "m"], y=["n + m"])
    relax.analysis.well_formed(rh.from_onnx(model))
