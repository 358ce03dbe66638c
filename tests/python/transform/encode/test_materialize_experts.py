"""MaterializeEncodings: products of many pairs of tokens and experts share one sort of an index on Hopper."""

from tvm import relax
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.transform import MaterializeEncodings, RealizeVDevice
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings

GPU, OLD_GPU = {"kind": "cuda", "arch": "sm_90a"}, {"kind": "cuda", "arch": "sm_80"}


def products(device):
    @ir_module(device)
    def Before(
        x: R.Tensor((96, 1, 1, 64), "float16"),
        index: R.Tensor((96, 6), "int32"),
        other: R.Tensor((96, 6), "int32"),
        condition: R.Tensor((), "bool"),
        weight: R.Tensor((9, 1, 32, 4), "int32"),
        scales: R.Tensor((9, 2, 8, 2), "float16"),
    ):
        gate = R.hetero.block_matmul(x, weight, scales, index, columns=48, block=32, experts=3)
        up = R.hetero.block_matmul(
            x, weight, scales, index, gate, columns=48, block=32, experts=3, expression="multiply(x0, x1)"
        )
        third = R.hetero.block_matmul(x, weight, scales, other, columns=48, block=32, experts=3)
        if condition:
            inside = R.hetero.block_matmul(x, weight, scales, index, columns=48, block=32, experts=3)
            y = R.add(inside, up)
        else:
            y = R.add(third, up)
        return y

    return RealizeVDevice()(Before)


def calls(mod):
    """Kernel and operands of each call, in order."""
    found = []
    for binding in walk_bindings(mod["main"]):
        value = binding.value
        if op_name(value) == "relax.call_tir":
            operands = ", ".join(arg.name for arg in value.args[1] if isinstance(arg, relax.Var))
            found.append(f"{binding.var.name} = {value.args[0].name_hint}({operands})")
    return found


SORT, PRODUCT = "expert_order_96x6x3_cuda_0", "block_matmul_96x6x1x48x64_cuda_0"


def test_products_of_an_index_share_a_sort():
    """A branch sorts for itself: what is defined in it is not seen outside, and it may come first."""
    after = MaterializeEncodings()(products(GPU))
    assert calls(after) == [
        f"gate_order = {SORT}(index)",
        f"gate = {PRODUCT}(x, weight, scales, gate_order)",
        f"up = {PRODUCT}_multiply(x, weight, scales, gate_order, gate)",
        f"third_order = {SORT}(other)",
        f"third = {PRODUCT}(x, weight, scales, third_order)",
        f"inside_order = {SORT}(index)",
        f"inside = {PRODUCT}(x, weight, scales, inside_order)",
    ]
    assert MaterializeEncodings()(after).same_as(after)


def test_other_gpus_read_the_index():
    after = calls(MaterializeEncodings()(products(OLD_GPU)))
    assert not any("order" in call for call in after)
    assert after[0] == f"gate = {PRODUCT}(x, weight, scales, index)"
