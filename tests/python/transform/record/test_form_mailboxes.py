"""Transfers between a GPU and the CPU that become mailboxes, and those that stay."""

import re

import numpy as np
import pytest
from tvm import relax
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.mailboxes import MailboxSpec
from relax_hetero.target.make_vdevice import parse_vdevices
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.transform.ir.rewriting import walk_bindings
from relax_hetero.transform.pipeline import pipeline_steps
from relax_hetero.transform.record import form_mailboxes
from relax_hetero.transform.record.form_mailboxes import FormMailboxes
from relax_hetero.transform.record.region_attrs import regions_of

GPU, CPU = {"kind": "cuda", "arch": "sm_90"}, {"kind": "llvm", "num-cores": 1}


@ir_module(GPU, CPU)
class Layers:
    """Two layers: one op on the GPU, two on the CPU, of which the second also takes a value of the GPU directly."""

    @R.function
    def main(x: R.Tensor((4, 8), "float32", "cuda:0")):
        with R.dataflow():
            a = R.exp(x)
            b = R.sqrt(a)
            c = R.to_vdevice(b, "llvm:0")
            d = R.tanh(c)
            e = R.to_vdevice(a, "llvm:0")
            f = R.add(d, e)
            g = R.to_vdevice(f, "cuda:0")
            h = R.exp(b)
            i = R.multiply(g, h)
            j = R.to_vdevice(i, "llvm:0")
            k = R.cos(j)
            l = R.to_vdevice(k, "cuda:0")  # noqa: E741
            m = R.exp(l)
            R.output(m)
        return m


def formed(mod, upto="FormCommandBuffers"):
    for step in pipeline_steps():
        if step.name == upto:
            return mod
        mod = step.run(mod)
    return mod


def text(mod):
    """Names of the results and kernels of main, in order, with what they read."""
    lines = []
    for binding in walk_bindings(mod["main"].body):
        found = re.sub(r"metadata\[[^]]*\]\[(\d+)\]", r"constant", str(binding.value)).partition("\n")[0]
        found = re.sub(r", (out_ty|dst_vdevice|ty_args)=.*", ")", found).replace("cls.", "")
        lines.append(f"{binding.var.name} = {found}")
    return lines


def test_alternating_transfers_become_mailboxes():
    mod = formed(Layers)
    # The first mailbox has both values that the CPU's kernel reads. A receiver follows the last one sent by its device.
    expected = """
        a = R.call_tir(tir_exp, (x,))
        b = R.call_tir(tir_sqrt, (a,))
        c_sent = R.call_tir(send_cuda, (constant, b, a))
        c_received = R.call_tir(receive_llvm, (constant,))
        c = c_received[0]
        e = c_received[1]
        f = R.call_tir(fused_tir_tanh_add, (c, e))
        g_sent = R.call_tir(send_llvm, (constant, f))
        g = R.call_tir(receive_cuda, (constant, c_sent))
        i = R.call_tir(fused_tir_exp_multiply, (b, g))
        j_sent = R.call_tir(send_cuda_1, (constant, i))
        j = R.call_tir(receive_llvm_1, (constant, g_sent))
        k = R.call_tir(tir_cos, (j,))
        l_sent = R.call_tir(send_llvm, (constant, k))
        l = R.call_tir(receive_cuda, (constant, j_sent))
        m = R.call_tir(tir_exp, (l,))
        _ = R.call_packed("relax_hetero.keep", j_sent)
        _ = R.call_packed("relax_hetero.keep", l_sent)
    """
    assert text(mod) == [line.strip() for line in expected.strip().splitlines()]
    assert not mod["main"].is_pure


def test_each_device_has_one_command_buffer():
    regions = regions_of(formed(Layers, upto="UpdateDonated"))
    gpu, cpu = regions
    kernels = [[command.kernel.rstrip("_0123456789") for command in region.commands] for region in regions]
    assert [name.partition("_")[0] for name in kernels[0] if name.startswith(("send", "receive"))] == [
        "send", "receive", "send", "receive",
    ]  # fmt: skip
    assert [name.partition("_")[0] for name in kernels[1] if name.startswith(("send", "receive"))] == [
        "receive", "send", "receive", "send",
    ]  # fmt: skip
    assert (gpu.runs, cpu.runs) == ("CUDA graph", "host function")
    assert gpu.device == 0 and cpu.device == 1


def test_a_second_run_changes_nothing():
    mod = formed(Layers)
    assert FormMailboxes()(mod).same_as(mod)


@pytest.mark.parametrize("name, value", [("MIN_EXCHANGES", 5), ("MAX_BYTES", 64)])
def test_few_or_large_transfers_stay(name, value, monkeypatch):
    monkeypatch.setattr(form_mailboxes, name, value)
    mod = formed(Layers)
    assert mod["main"].is_pure and sum("to_vdevice" in line for line in text(mod)) == 5


def test_a_command_buffer_has_a_limited_number_of_kernels(monkeypatch):
    """Past it, a layer's transfers stay, and the next command buffers begin after them."""
    monkeypatch.setattr(form_mailboxes, "MAX_CALLS", form_mailboxes._SPARE_CALLS + 3)
    monkeypatch.setattr(form_mailboxes, "MIN_EXCHANGES", 1)
    mod = formed(Layers)
    assert 0 < sum("to_vdevice" in line for line in text(mod)) < 5


@ir_module(GPU, CPU)
class BeginsOnTheCpu:
    """The CPU's kernels before the GPU's first one are not in the command buffer that waits for the GPU."""

    @R.function
    def main(x: R.Tensor((8,), "float32", "llvm:0")):
        with R.dataflow():
            w = R.tanh(x)
            a = R.to_vdevice(w, "cuda:0")
            b = R.exp(a)
            c = R.to_vdevice(b, "llvm:0")
            d = R.tanh(c)
            e = R.to_vdevice(d, "cuda:0")
            f = R.exp(e)
            g = R.to_vdevice(f, "llvm:0")
            h = R.tanh(g)
            i = R.to_vdevice(h, "cuda:0")
            j = R.exp(i)
            R.output(j)
        return j


def test_a_function_that_begins_on_the_cpu():
    mod = formed(BeginsOnTheCpu)
    kinds = [line for line in text(mod) if "to_vdevice" in line]
    assert len(kinds) == 1 and kinds[0].startswith("a = ")
    gpu, cpu = (region for region in regions_of(formed(BeginsOnTheCpu, upto="UpdateDonated")))
    assert gpu.device == 0 and cpu.device == 1


@ir_module(GPU, CPU)
class CallsBetween:
    """A callback between the devices' kernels ends all command buffers, so that no mailbox may cross it."""

    @R.function(pure=False)
    def main(x: R.Tensor((8,), "float32", "cuda:0")):
        a = R.exp(x)
        c = R.to_vdevice(a, "llvm:0")
        d = R.tanh(c)
        R.call_packed("test.callback", d, ty_args=R.Tuple([]))
        e = R.to_vdevice(d, "cuda:0")
        f = R.exp(e)
        return f


def test_impure_functions_keep_their_transfers():
    mod = formed(CallsBetween)
    assert sum("to_vdevice" in line for line in text(mod)) == 2


def test_symbolic_shapes_stay():
    @ir_module(GPU, CPU)
    class Symbolic:
        @R.function
        def main(x: R.Tensor(("n", 8), "float32", "cuda:0")):
            with R.dataflow():
                a = R.exp(x)
                b = R.to_vdevice(a, "llvm:0")
                c = R.tanh(b)
                d = R.to_vdevice(c, "cuda:0")
                e = R.exp(d)
                f = R.to_vdevice(e, "llvm:0")
                g = R.tanh(f)
                h = R.to_vdevice(g, "cuda:0")
                i = R.exp(h)
                R.output(i)
            return i

    mod = formed(Symbolic)
    assert mod["main"].is_pure and sum("to_vdevice" in line for line in text(mod)) == 4


def test_metadata_of_an_executable(tmp_path):
    executable = rh.compile(Layers)
    ends = [spec for spec in executable.metadata.constants if spec.mailbox is not None]
    assert sorted((spec.mailbox.number, spec.device) for spec in ends) == [(n, d) for n in range(4) for d in (0, 1)]
    assert all(executable.metadata.has_mailboxes(region) for region in executable.metadata.regions)
    executable.export_library(tmp_path / "layers.so")
    loaded = rh.load(tmp_path / "layers.so")
    assert [spec.mailbox for spec in loaded.metadata.constants] == [s.mailbox for s in executable.metadata.constants]


def test_placeholder():
    spec = MailboxSpec(7, 4096)
    assert MailboxSpec.of(spec.placeholder().tobytes()) == spec
    assert MailboxSpec.of(np.zeros(64, "uint8").tobytes()) is None


def layers(count, cpu=CPU):
    """A chain of layers, each with a kernel of the GPU and one of the CPU."""
    vdevices, builder = parse_vdevices([GPU, cpu]), relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([8], "float32", vdevices[0]))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = x
            for _ in range(count):
                sent = builder.emit(relax.op.to_vdevice(builder.emit(relax.op.exp(value)), vdevices[1]))
                back = builder.emit(relax.op.to_vdevice(builder.emit(relax.op.tanh(sent)), vdevices[0]))
                value = builder.emit(relax.op.add(back, value))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return with_vdevices(builder.get(), vdevices)


def test_a_deep_model_has_several_command_buffers_with_mailboxes():
    """Of each hundred layers or so, one keeps its transfers."""
    mod = formed(layers(150))
    stay = sum("to_vdevice" in line for line in text(mod))
    assert 2 <= stay <= 6 and not mod["main"].is_pure
    regions = regions_of(formed(mod, upto="UpdateDonated"))
    ends = [sum(c.kernel.startswith(("send", "receive")) for c in region.commands) for region in regions]
    assert sum(ends) == 2 * (300 - stay) and sum(map(bool, ends)) >= 4


def test_a_module_with_mailboxes_compiles():
    for stage in ("FormCommandBuffers", "FormCudaGraphs"):
        executable = rh.compile(formed(Layers, upto=stage))
        assert sum(spec.mailbox is not None for spec in executable.metadata.constants) == 8


def test_a_cpu_of_another_kind_keeps_its_transfers():
    """Code in C cannot wait for a flag."""
    mod = formed(layers(4, {"kind": "c"}))
    assert sum("to_vdevice" in line for line in text(mod)) == 8


def test_both_directions_are_needed():
    """A CPU that only sends would not wait for the GPU."""

    @ir_module(GPU, CPU)
    class OneWay:
        @R.function
        def main(x: R.Tensor((8,), "float32", "llvm:0"), y: R.Tensor((8,), "float32", "cuda:0")):
            with R.dataflow():
                a = R.exp(y)
                b = R.add(a, R.to_vdevice(R.tanh(x), "cuda:0"))
                c = R.add(b, R.to_vdevice(R.cos(x), "cuda:0"))
                d = R.add(c, R.to_vdevice(R.sin(x), "cuda:0"))
                e = R.add(d, R.to_vdevice(R.exp(x), "cuda:0"))
                R.output(e)
            return e

    assert formed(OneWay)["main"].is_pure
