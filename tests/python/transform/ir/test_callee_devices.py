"""The devices in the types by which functions are called."""

from tvm.script import relax as R

from modules import ir_module
from relax_hetero.target.vdevice import same_object
from relax_hetero.transform import FormDispatches, RealizeVDevice
from relax_hetero.transform.ir.rewriting import walk_bindings


def test_results_of_a_call_keep_their_devices_where_its_arguments_are_fused():
    """Fusing writes the call anew, as its argument is another variable, and derives its type from the callee's."""

    @ir_module({"kind": "llvm", "mcpu": "x86-64-v2"})
    class Mod:
        @R.function(private=True)
        def step(x: R.Tensor(("b", 8), "float32")) -> R.Tuple(R.Tensor(("b", 8), "float32"), R.Tensor((), "int64")):
            with R.dataflow():
                y = R.tanh(x)
                result = (y, R.const(1, "int64"))
                R.output(result)
            return result

        @R.function
        def main(x: R.Tensor(("b", 8), "float32")):
            cls = Mod
            with R.dataflow():
                doubled = R.add(x, x)
                fed = R.exp(doubled)
                both = cls.step(fed)
                y = both[0]
                shifted = R.add(y, R.const(1.0, "float32"))
                z = R.multiply(shifted, shifted)
                R.output(z)
            return z

    after = FormDispatches()(RealizeVDevice()(Mod))
    (device,) = after.global_infos["vdevice"]
    before_call, call, field, behind = walk_bindings(after["main"])
    assert before_call.var.ty == call.value.args[0].ty  # one kernel of `doubled` and `fed`
    assert behind.value.args[1].fields[0].same_as(field.var)  # one kernel of `shifted` and `z`
    assert same_object(field.var.ty.vdevice, device)
