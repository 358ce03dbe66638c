"""Ops that users register: converters, PrimFuncs and numpy functions; clashes, versions and wrong results."""

from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from tvm import relax
from tvm.script import tirx as T

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from relax_hetero.errors import FrontendError, HeteroError
from relax_hetero.frontend import register_op, unregister_op
from relax_hetero.target.backend import backend_of, register_backend

pytestmark = pytest.mark.sampled(1)  # the variants are cheap
NPU = Path(__file__).resolve().parents[4] / "examples" / "backend_npu"

WHOLE = """
<ir_version: 8, opset_import: ["" : 17, "acme" : 1, "local" : 1]>
g (float[n, 6] x) => (float[n, 6] y, float[n] low, int64[n] best) {
    [turn] t = acme.Spin <by = 2> (x)
    [double] d = acme.Double (t)
    [stats] low, best = acme.Stats <scale = 0.5, labels = ["a", "b"]> (d, , x)
    [call] y = local.Both (d)
}
<domain: "local", opset_import: ["" : 17, "acme" : 1]>
Both (a) => (b) { [inner] c = acme.Spin <by = 1> (a) b = Neg (c) }
"""


def one_node(op: str, imports: str = '"acme" : 1', output: str = "float[2, 3]") -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, {imports}]> g (float[2, 3] x) => ({output} y) {{ [it] {op} }}'
    )


@T.prim_func(private=True, s_tir=True)
def double(x: T.handle, y: T.handle):
    n = T.int64()
    X = T.match_buffer(x, (n, T.int64(6)), "float32")
    Y = T.match_buffer(y, (n, T.int64(6)), "float32")
    for i, j in T.grid(n, T.int64(6)):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[vi, vj] * T.float32(2)


def rows(node):
    size = node.shape(node.tensor(0))[:1]
    return [relax.TensorType(size, "float32"), relax.TensorType(size, "int64")]


heard: list[object] = []


def stats(x, nothing, y, scale, labels):
    heard.append((nothing, scale, labels, x.flags.writeable, y.shape))
    return x.min(axis=1) * np.float32(scale), x.argmax(axis=1)


@pytest.fixture(scope="module")
def ops():
    @register_op("acme", "Spin")
    def spin(node):
        by = node.attribute("by")
        return node.kernel("spin", lambda at, x: x[at[0], (at[1] + by) % 6], node.tensor(0))

    @register_op("acme", "Double")
    def twice(node):
        x = node.tensor(0)
        return node.call_tir(double, x, out=relax.TensorType(node.shape(x), "float32"))

    register_op("acme", "Stats", infer=rows)(stats)
    yield
    for name in ("Spin", "Double", "Stats"):
        unregister_op("acme", name)


@pytest.fixture
def registered():
    """Register ops for one test."""
    names = []

    def register(domain, name, function, **options):
        register_op(domain, name, **options)(function)
        names.append((domain, name))

    yield register
    for domain, name in names:
        unregister_op(domain, name)


@pytest.fixture(scope="module")
def executable(ops):
    model = onnx.parser.parse_model(WHOLE)
    return rh.compile(rh.from_onnx(model, ["llvm", "llvm:1"], {"stats": "llvm:1"}))


X = np.random.default_rng(0).standard_normal((4, 6)).astype("float32")


def check_whole(results, x=X):
    y, low, best = (result.numpy() for result in results)
    turned = 2 * np.roll(x, -2, 1)
    np.testing.assert_array_equal(y, -np.roll(turned, -1, 1))
    np.testing.assert_array_equal(low, turned.min(1) * np.float32(0.5))
    np.testing.assert_array_equal(best, turned.argmax(1))


def test_converters_kernels_and_numpy_functions(executable, tmp_path):
    executable.export_library(tmp_path / "model.so")
    for each in (executable, rh.load(tmp_path / "model.so")):
        machine = rh.vm.VirtualMachine(each)
        for results in (machine["main"](X), machine.submit("main", X).result(60)):
            check_whole(results)
            assert [str(result.device) for result in results] == ["cpu:0", "cpu:1", "cpu:1"]
    check_whole(machine["main"](X[:1]), X[:1])
    assert heard[-1] == (None, 0.5, ["a", "b"], False, (1, 6)) and len(heard) == 5


def test_kernels_on_a_gpu(ops):
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17, "acme" : 1]>
        g (float[n, 6] x) => (float[n, 6] y) { t = acme.Spin <by = 2> (x) d = acme.Double (t) y = Neg (d) }""")
    for shapes in (None, {"n": 4}):
        interpreted = InterpretedModel(rh.from_onnx(model, [{"kind": "cuda", "arch": "sm_90a"}], shapes=shapes))
        np.testing.assert_array_equal(interpreted(X), -2 * np.roll(X, -2, 1))
        assert interpreted.launched


def test_tensors_must_fit_the_parameters_of_a_kernel(registered):
    for inputs, out, message in (
        ([0, 0], (2, 6), "kernel has 2 parameters, but gets 3 tensors"),
        ([0], (2, 7), r"parameter 'X' of its kernel is float32\[n, 6\], but gets .*2, 3"),
    ):
        registered(
            "acme", "It",
            lambda node, inputs=inputs, out=out: node.call_tir(
                double, *map(node.tensor, inputs), out=relax.TensorType(out, "float32")
            ),
            override=True,
        )  # fmt: skip
        with pytest.raises(FrontendError, match=f"It node 'it': .*{message}"):
            rh.from_onnx(one_node("y = acme.It(x)"))


def test_values_of_a_device_are_copied_there_and_back(ops, monkeypatch):
    monkeypatch.syspath_prepend(NPU)
    import backend_npu

    before = backend_of("ext_dev")
    register_backend(backend_npu.NpuBackend())
    try:
        module = rh.from_onnx(onnx.parser.parse_model(WHOLE), ["llvm", "ext_dev"], {"turn": "llvm", "*": "ext_dev"})
        results = rh.vm.VirtualMachine(rh.compile(module))["main"](X)
        assert [str(result.device) for result in results] == ["ext_dev:0"] * 3
        check_whole(results)
    finally:
        register_backend(before)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x[:1], r"result 0 of its numpy function .*anything is float32\[1, 3\], expected float32\[2, 3\]"),
        (lambda x: x.astype("float64"), r"is float64\[2, 3\], expected float32\[2, 3\], the type that infer="),
        (lambda x: None, r"is object\[\]"),
        (lambda x: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda x: x.sort(), "raised ValueError: .*read-only"),
        (lambda x: x, None),
    ],
)
def test_wrong_results_of_a_numpy_function_are_errors(numpy_machine, function, message):
    machine, behaviour = numpy_machine
    behaviour[:] = [function]
    x = X[:2, :3].copy()
    if message is None:
        result = machine["main"](x).numpy()
        x[:] = 0  # the function returned its argument, which the result must not share
        np.testing.assert_array_equal(result, X[:2, :3])
    else:
        with pytest.raises(HeteroError, match=f"Any node 'it': .*{message}"):
            machine["main"](x)


@pytest.fixture(scope="module")
def numpy_machine():
    behaviour = []

    @register_op("acme", "Any", infer=lambda node: relax.TensorType((2, 3), "float32"))
    def anything(x):
        return behaviour[0](x)

    yield rh.vm.VirtualMachine(rh.compile(rh.from_onnx(one_node("y = acme.Any(x)")))), behaviour
    unregister_op("acme", "Any")


def test_several_results_are_counted(ops, executable):
    register_op("acme", "Stats", infer=rows, override=True)(lambda *arrays, **attributes: np.zeros(4, "float32"))
    with pytest.raises(HeteroError, match="Stats node 'stats': its numpy function .* returned ndarray, .* tuple of 2"):
        rh.vm.VirtualMachine(executable)["main"](X)
    register_op("acme", "Stats", infer=rows, override=True)(stats)


@pytest.mark.parametrize(
    ("op", "output", "infer", "function", "message"),
    [
        ("y = acme.It(x)", "float[2, 3]", None, lambda node: None, "returned None, expected a Relax expression"),
        ("y, z = acme.It(x)", "float[2, 3]", None, lambda node: node.tensor(0), "returned 1 outputs, .* node has 2"),
        ("y = acme.It(x)", "int64[2, 3]", None, lambda node: node.tensor(0), "is float32, but .* declares int64"),
        ("y = acme.It(x)", "float[2, 4]", None, lambda node: node.tensor(0), r"\[2, 3\], but .* declares \[2, 4\]"),
        ("y = acme.It(x)", "float[2]", None, lambda node: node.tensor(0), r"\[2, 3\], but the model declares \[2\]"),
        ("y = acme.It(x)", "float[2, 3]", None, lambda node: node.tensor(1), ": input 1 is missing"),
        ("y = acme.It(x)", "float[2, 3]", None, lambda node: {}["a"], "cannot be imported: KeyError"),
        ("y = acme.It(x)", "float[2, 3]", lambda node: None, len, "infer= of register_op returned None, expected"),
        (
            "y = acme.It <v = float[1] {1.0}> (x)", "float[2, 3]", lambda node: node.tensor(0).ty, len,
            "attributes that are numbers, text or lists",
        ),
    ],
)  # fmt: skip
def test_wrong_results_of_a_converter_are_errors(registered, op, output, infer, function, message):
    registered("acme", "It", function, infer=infer)
    with pytest.raises(FrontendError, match=f"(It )?node 'it'.*{message}"):
        rh.from_onnx(one_node(op, output=output))


def test_an_unknown_op_says_how_to_register_it():
    call = r"@rh.frontend.register_op\('acme', 'It'\)"
    with pytest.raises(FrontendError, match=f"node 'it': It of domain 'acme', opset 1; {call}"):
        rh.from_onnx(one_node("y = acme.It(x)"))
    (node,) = rh.onnx_report(one_node("y = acme.It(x)")).refused
    assert node.reason == "no converter takes this op; @rh.frontend.register_op('acme', 'It') adds one"


@pytest.mark.parametrize("domain", ["", "ai.onnx"])
def test_a_standard_op_is_replaced_only_on_request(registered, domain):
    def relu(node):
        return relax.op.negative(node.tensor(0))

    for name, message in (("Relu", "this library converts this op itself"), ("If", "the importer itself")):
        with pytest.raises(FrontendError, match=rf"register_op\({domain!r}, {name!r}\): {message}"):
            register_op(domain, name)(relu)
    registered(domain, "Relu", relu, override=True)
    assert "R.negative" in rh.from_onnx(one_node("y = Relu(x)")).script()
    unregister_op("", "Relu")
    assert "R.nn.relu" in rh.from_onnx(one_node("y = Relu(x)")).script()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("acme", ""), "expected the domain and the name"),
        ((1, "It"), "expected the domain and the name"),
        (("acme", "It", 0), "found since_version=0"),
        (("acme", "It", "1"), "found since_version='1'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    domain, name, version = (*arguments, 1)[:3]
    with pytest.raises(FrontendError, match=message):
        register_op(domain, name, since_version=version)
    with pytest.raises(FrontendError, match="found 3 and infer=None, expected functions"):
        register_op("acme", "It")(3)


def test_the_latest_version_that_the_model_reaches_is_used(registered):
    for version, op in ((2, relax.op.exp), (4, relax.op.tanh)):
        registered("acme", "It", lambda node, op=op: op(node.tensor(0)), since_version=version)
    for imported, op in ((2, "R.exp"), (3, "R.exp"), (4, "R.tanh"), (9, "R.tanh")):
        assert op in rh.from_onnx(one_node("y = acme.It(x)", f'"acme" : {imported}')).script()
    with pytest.raises(FrontendError, match="'it' .* is of version 1 of domain 'acme', .* registered since version 2"):
        rh.from_onnx(one_node("y = acme.It(x)"))
    with pytest.raises(FrontendError, match="lambda> is registered for it already"):
        register_op("acme", "It", since_version=4)(stats)


def test_a_process_that_lacks_the_numpy_function_is_told(executable):
    unregister_op("acme", "Stats")
    with pytest.raises(
        HeteroError, match=r"numpy function of op 'Stats' of domain 'acme', .*register_numpy_op\('acme',"
    ):
        rh.vm.VirtualMachine(executable)
    rh.vm.register_numpy_op("acme", "Stats", stats)  # enough to run it
    check_whole(rh.vm.VirtualMachine(executable)["main"](X))
    register_op("acme", "Stats", infer=rows)(stats)
    check_whole(rh.vm.VirtualMachine(executable)["main"](X))


def test_sessions_of_onnxruntimes_interface(ops):
    from relax_hetero.compat import InferenceSession

    session = InferenceSession(onnx.parser.parse_model(WHOLE).SerializeToString())
    low = np.roll(X, -2, 1).min(1)
    np.testing.assert_array_equal(session.run(["low"], {"x": X})[0], low)
