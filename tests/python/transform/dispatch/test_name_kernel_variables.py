"""Kernels made for variables with the names of ONNX nodes can be written as C."""

import tvm
from tvm import relax, tirx

import relax_hetero as rh  # noqa: F401 (makes TVMScript strict, as in use)
from relax_hetero.transform.dispatch.name_kernel_variables import NameKernelVariables


def legalized(name):
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    x = relax.Var(name, relax.TensorType((n, 4), "float32"))
    with builder.function("main", [x]):
        inner = builder.emit(relax.op.exp(x), name)
        builder.emit_func_output(builder.emit(relax.op.nn.softmax(inner), name))
    return relax.transform.LegalizeOps()(builder.get())


def kernels(mod):
    return {gvar.name_hint: func for gvar, func in mod.functions.items() if isinstance(func, tirx.PrimFunc)}


def test_names_become_identifiers_and_nothing_else_changes():
    before = legalized('/encoder/layer.0/Mat-Mul:é "0"')
    after = NameKernelVariables()(before)
    names = {param.name for func in kernels(after).values() for param in func.params}
    assert "_encoder_layer_0_Mat_Mul____0_" in names
    assert all(name.isidentifier() and name.isascii() for name in names)
    tvm.ir.assert_structural_equal(after, before)


def test_a_name_that_starts_with_a_digit():
    after = NameKernelVariables()(legalized("1"))
    assert "_1" in {param.name for func in kernels(after).values() for param in func.params}


def test_a_module_of_identifiers_is_left_as_it_is():
    before = legalized("x")
    assert NameKernelVariables()(before).same_as(before)
    renamed = NameKernelVariables()(legalized("a/b"))
    assert NameKernelVariables()(renamed).same_as(renamed)


def test_the_kernels_can_be_written_as_c():
    renamed = NameKernelVariables()(legalized("/layer.0/exp"))
    target = tvm.target.Target("c", host="c")
    for func in kernels(renamed).values():
        kernel = tvm.IRModule({"k": func.with_attrs({"global_symbol": "k", "target": target})})
        source = tvm.tirx.build(kernel, target).inspect_source()
        assert "/layer" not in source and "_layer_0_exp" in source
