"""Meshes of two GPUs against numpy and against one GPU: sums by kernels, exchanges by copies, a language model."""

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from llm.gguf_files import MODELS, write_gguf
from modules import ir_module
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
        texts.append(rows)
    assert texts[0] == texts[1]
