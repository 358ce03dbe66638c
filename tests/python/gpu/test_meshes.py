"""Meshes of two GPUs against numpy and against one GPU: sums by kernels, exchanges by copies, a language model."""

import json

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from modules import ir_module
from relax_hetero.encoding.token_masks import pack_mask
from relax_hetero.frontend import LinkCost, PagedCache
from relax_hetero.frontend.gguf.file import read_gguf
from relax_hetero.llm.calibrate import calibrate
from relax_hetero.tools.scale import fleet_of
from relax_hetero.transform.shard.partition_by_mesh import SPLIT_PARAMETERS
from seeds import fresh_rng

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")]
TOKENS = np.random.default_rng(1).integers(0, 320, 40)


def sums(count):
    """Twice the sum of the rows of ``(2, count)``, of which each GPU has one; both GPUs use the first sum."""
    ones, shape = np.ones((1, count), "float32"), (2, count)

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            rows = R.hetero.shard(x, "S[0]")
            total = R.sum(rows, [0], keepdims=True)
            again = R.hetero.shard(R.concat((total, R.multiply(total, R.const(ones))), axis=0), "S[0]")
            result = R.sum(again, [0], keepdims=True)
            y = R.hetero.shard(R.add(result, R.const(ones)), "R")
            R.output(y)
        return y

    return rh.vm.VirtualMachine(rh.compile(mod))


# The last three are at the border of the two protocols, and beyond.
@pytest.mark.parametrize("count", [3, 4, 1000, 4096, 131072, 131076, 3_000_004])
def test_sums(count):
    vm, generator = sums(count), fresh_rng()
    for _ in range(5):
        x = generator.integers(-1000, 1000, (2, count)).astype("float32")
        np.testing.assert_array_equal(np.asarray(vm["main"](x)), 2 * x.sum(0, keepdims=True) + 1)
    np.testing.assert_array_equal(np.asarray(vm.submit("main", x).result()), 2 * x.sum(0, keepdims=True) + 1)


# Short; long; rows that GPUs cannot share; rows of more than 512 threads, short and long.
@pytest.mark.parametrize(("rows", "width"), [(3, 64), (96, 2048), (97, 2048), (2, 12288), (40, 16384)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norms_of_sums(rows, width, dtype):
    generator = np.random.default_rng(2)
    scale = generator.uniform(0.5, 2, width).astype("float32")
    ups = [generator.standard_normal((width, 64)).astype("float32") / width**0.5 for _ in range(3)]
    downs = [(generator.standard_normal((64, width)) * size).astype("float32") for size in (1, 1e6)]
    shape = (rows, width)

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor(shape, "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.add(x, R.matmul(R.matmul(x, R.const(ups[0])), R.const(downs[0])))
            b = R.astype(R.nn.rms_norm(a, R.const(scale), axes=[-1], epsilon=1e-5), dtype)
            c = R.add(a, R.matmul(R.matmul(R.astype(b, "float32"), R.const(ups[1])), R.const(downs[1])))
            y = R.matmul(R.multiply(c, R.const(1e-6, "float32")), R.const(ups[2]))
            R.output(y)
        return y

    def norm(a):
        return a / np.sqrt((a * a).mean(1, keepdims=True) + 1e-5) * scale

    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for _ in range(3):
        x = fresh_rng().standard_normal(shape).astype("float32") * np.float32(1e6)  # beyond float16
        a = x + x.astype("float64") @ ups[0] @ downs[0]
        c = a + norm(a) @ ups[1] @ downs[1]
        expected = 1e-6 * c @ ups[2]
        atol = {"float32": 1e-5, "float16": 2e-3}[dtype] * np.abs(expected).max()
        np.testing.assert_allclose(np.asarray(vm["main"](x)), expected, atol=atol, rtol=1e-4)


def test_products_send_what_other_gpus_add():
    """Products of several tiles for each block, between sums with norms, of which each adds the last one."""
    rows, width, depth = 2048, 4096, 1024
    generator = np.random.default_rng(3)
    scale = generator.uniform(0.5, 2, width).astype("float32")
    ups = [(generator.standard_normal((width, depth)) / width**0.5).astype("float16") for _ in range(4)]
    downs = [(generator.standard_normal((depth, width)) / depth**0.5).astype("float16") for _ in range(3)]

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor((rows, width), "float32", "cuda[0:2]")):
        with R.dataflow():
            h = R.astype(x, "float16")
            a = R.add(x, R.matmul(R.matmul(h, R.const(ups[0])), R.const(downs[0]), out_dtype="float32"))
            b = R.astype(R.nn.rms_norm(a, R.const(scale), axes=[-1], epsilon=1e-5), "float16")
            c = R.add(a, R.matmul(R.matmul(b, R.const(ups[1])), R.const(downs[1]), out_dtype="float32"))
            d = R.astype(R.nn.rms_norm(c, R.const(scale), axes=[-1], epsilon=1e-5), "float16")
            e = R.add(c, R.matmul(R.matmul(d, R.const(ups[2])), R.const(downs[2]), out_dtype="float32"))
            f = R.astype(R.nn.rms_norm(e, R.const(scale), axes=[-1], epsilon=1e-5), "float16")
            y = R.matmul(f, R.const(ups[3]), out_dtype="float32")
            R.output(y)
        return y

    executable = rh.compile(mod)
    assert sum("_sent" in name for name in executable.metadata.kernels) >= 4  # products and sums of both GPUs
    vm = rh.vm.VirtualMachine(executable)
    for _ in range(5):
        total = fresh_rng().standard_normal((rows, width)).astype("float32")
        normal, x = total, total
        for up, down in zip(ups[:3], downs, strict=True):
            hidden = (normal.astype("float16").astype("float32") @ up.astype("float32")).astype("float16")
            total = total + hidden.astype("float32") @ down.astype("float32")
            normal = total / np.sqrt((total * total).mean(1, keepdims=True) + 1e-5) * scale
        expected = normal.astype("float16").astype("float32") @ ups[3].astype("float32")
        np.testing.assert_allclose(np.asarray(vm["main"](x)), expected, atol=5e-3 * np.abs(expected).max())


def test_kernels_that_wait_are_not_profiled():
    vm, x = sums(1024), np.ones((2, 1024), "float32")
    for _ in range(2):
        with pytest.raises(rh.HeteroError, match="wait for those of other GPUs"):
            vm.profile("main", x)
        np.testing.assert_array_equal(np.asarray(vm["main"](x)), np.full((1, 1024), 5, "float32"))


@pytest.mark.parametrize(("name", "types"), [("llama", "F16"), ("qwen3moe", {"*exps*": "Q4_K", "*": "Q8_0"})])
def test_a_language_model_has_the_tokens_of_one_gpu(name, types, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", MODELS[name], types)
    texts = []
    for count in (1, 2):
        model, _ = rh.llm.load(
            path, "cuda", tensor_parallel=count, batches=(2,), chunks=(16, 32), context=128, background=False
        )
        slots = [model.cache.add(), model.cache.add()]
        rows = [[int(model.prefill(slot, TOKENS[: 21 + slot]).argmax())] for slot in slots]
        step = model.begin_decode(slots, [row[-1] for row in rows])
        for _ in range(8):  # each begins before the tokens of the last one are read
            ahead = model.begin_decode(slots, step)
            for token, row in zip(step.tokens(), rows, strict=True):
                row.append(token)
            step = ahead
        assert [region.device for region in model.executable.metadata.regions if region.function == "decode_2"] == [
            *range(count)  # a step is one CUDA graph for each GPU
        ]
        logits = model.decode(slots, step.tokens()).copy()
        assert logits.shape == (2, 320) and np.isfinite(logits).all()
        for row, values in zip(rows, logits, strict=True):
            row.append(int(values.argmax()))
        allowed = np.arange(320) % 7 == 3
        step = model.begin_decode(slots, [row[-1] for row in rows])
        masked = step.masked_tokens(np.stack([pack_mask(allowed)] * 2))
        assert allowed[masked].all()
        for row, token in zip(rows, masked, strict=True):
            row.append(token)
        texts.append(rows)
    assert texts[0] == texts[1]


def test_calls_of_stages_follow_each_other(tmp_path):
    """A step of four texts in two calls of two: the second one begins while the first is on the other GPU."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "F16")
    options = {"batches": (2,), "chunks": (16,), "slots": 4, "context": 64, "background": False}
    stages = {"blk.1.*": "cuda:1", "output*": "cuda:1", "last_row*": "cuda:1", "*": "cuda:0"}
    texts = []
    for devices, placement in ("cuda", None), (["cuda:0", "cuda:1"], stages):
        model, _ = rh.llm.load(path, devices, placement, **options)
        slots = [model.cache.add() for _ in range(4)]
        for slot in slots:
            model.prefill(slot, TOKENS[slot : slot + 9])
        step = model.begin_decode(slots, TOKENS[9:13].tolist())
        assert len(step.calls) == 2
        rows = [step.tokens()]
        for _ in range(4):
            step = model.begin_decode(slots, step)
            rows.append(step.tokens())
        texts.append(rows)
    assert texts[0] == texts[1]


def test_layers_are_measured(tmp_path):
    """On one GPU, for each number of texts, with rates that were measured."""
    path = write_gguf(tmp_path / "model.gguf", MODELS["llama"], "F16")
    vdevices, costs, _ = fleet_of("cuda", 1, 2, LinkCost(1e9, 1e-3), measure=True)
    measured = calibrate(read_gguf(path), PagedCache((4,), (32,), 4, 64), vdevices[0], costs, 4)
    assert set(measured.decode) == {1, 2, 4} and measured.prefill > 0 and costs.figures != "tables"


def test_both_gpus_gather_a_small_value():
    copies = {"b": {"placement": "R", "names": ["b", "b@1"], "mesh": [0, 1]}}

    @ir_module("cuda", "cuda:1")
    def mod(x: R.Tensor((4, 6), "float32", "cuda[0:2]")):
        with R.dataflow():
            a = R.hetero.shard(x, "S[1]")
            b = R.multiply(a, R.const(2.0, "float32"))
            R.output(b)
        return b

    function = mod["main"].with_attrs({SPLIT_PARAMETERS: json.dumps(copies), "output_names": ["b"]})
    mod.update_func(mod.get_global_var("main"), function)
    vm = rh.vm.VirtualMachine(rh.compile(mod))
    for _ in range(3):
        x = fresh_rng().standard_normal((4, 6)).astype("float32")
        x[1, 4], x[2, 1] = np.nan, np.inf
        for whole in vm["main"](x):
            np.testing.assert_array_equal(np.asarray(whole), 2 * x)
