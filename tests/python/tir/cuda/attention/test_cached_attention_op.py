"""The op `cached_attention` on a GPU, through all passes that make kernels, by the interpreter of these."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from relax_hetero.errors import HeteroError
from relax_hetero.op.cached_attention import cached_attention
from relax_hetero.target.vdevice import with_vdevices
from seeds import fresh_rng
from tir.cuda.attention.paged_cases import Call, case, check
from tir.cuda.gpu_runs import needs_gpu

HOPPER = {"kind": "cuda", "arch": "sm_90a"}
CASES = {
    "decode": case((70, 3), rotary="halves", rotated=32, has_q_norm=True, has_k_norm=True, sinks=True),
    "verify": case((70, 61), verify=4, padded=1, rotary="halves", rotated=32, has_q_norm=True, has_k_norm=True),
    "verify, with a window": case((130, 190), verify=3, window=70, sinks=True),
    "verify, keys are values": case((62,), 4, 1, 96, verify=4, rotary="pairs", rotated=32, shared_values=64),
    "chunk": case((60,), chunk=9, rotary="pairs", rotated=16, has_k_norm=True, padded=1),
    "decode, keys are values": case((70, 3), 16, 1, 96, rotary="pairs", rotated=32, shared_values=64),
    "decode, keys are values of two tiles": case((70,), 20, 1, 64, shared_values=64),
    "chunk, keys are values": case((60,), 2, 1, 96, chunk=9, rotary="pairs", rotated=32, shared_values=64),
}


def module_of(call, gpu, any_pages=False):
    """A function that is one op on the call's arguments; of any number of pages, or of the call's."""
    work = call.work
    builder = relax.BlockBuilder()
    names = ["qkv", "pages", "table", "sequences", "positions"]
    names += ["rotation"] * bool(work.rotary) + ["q_norm"] * work.has_q_norm + ["k_norm"] * work.has_k_norm
    names += ["sinks"] * work.sinks
    params = [
        relax.Var(name, relax.TensorType(list(array.shape), str(array.dtype)))
        for name, array in zip(names, call.arguments(), strict=True)
    ]
    if any_pages:
        pages = [tvm.tirx.Var("count", "int64"), *call.pages.shape[1:]]
        params[1] = relax.Var("pages", relax.TensorType(pages, str(call.pages.dtype)))
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit(
                cached_attention(
                    *params,
                    heads=work.heads,
                    kv_heads=work.kv_heads,
                    size=work.size,
                    scale=work.scale,
                    window=work.window,
                    rotary=work.rotary,
                    norms="q" * work.has_q_norm + "k" * work.has_k_norm,
                    eps=work.eps,
                    rows=work.kind,
                    sinks=work.sinks,
                    shared_values=work.shared_values,
                )
            )
            result = builder.emit_output(output)
        builder.emit_func_output(result)
    return with_vdevices(builder.finalize(), [rh.VDevice(gpu)])


@pytest.mark.parametrize("any_pages", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_kernels(name, any_pages):
    call = Call(CASES[name], fresh_rng())
    model = InterpretedModel(module_of(call, HOPPER, any_pages))
    arguments = call.arguments()
    arguments[1] = call.pages.copy()
    check(call, *model(*arguments))
    kinds = [launched.split("_")[0] for launched in model.launched]
    appends = call.work.kind != "decode" or call.work.group > 16
    expected = ["append"] * appends + [call.work.kind]
    assert [kind for kind in kinds if kind in ("append", "chunk", "decode", "verify")] == expected


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("any_pages", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_in_place_on_a_gpu(name, any_pages):
    """Three calls, the last of a CUDA graph: pages that a call gives are those that it took."""
    call = Call(CASES[name], fresh_rng())
    vm = rh.vm.VirtualMachine(rh.compile(module_of(call, "cuda", any_pages), donate=["pages"], cache=False))
    arguments = [tvm.runtime.tensor(array, tvm.cuda(0)) for array in call.arguments()]
    for _ in range(3):
        before = arguments[1].data_ptr()
        out, arguments[1] = vm["main"](*arguments)
        assert arguments[1].data_ptr() == before
    check(call, out.numpy(), arguments[1].numpy())


def test_a_gpu_without_kernels_is_named():
    call = Call(CASES["decode"], fresh_rng())
    with pytest.raises(HeteroError, match="sm_80 lacks bulk copies"):
        rh.compile(module_of(call, {"kind": "cuda", "arch": "sm_80"}), cache=False)
