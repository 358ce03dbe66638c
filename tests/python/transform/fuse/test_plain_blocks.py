"""Weights in blocks as plain ops: the same numbers as those of their definitions, to the bit."""

import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh
from encoding.random_blocks import random_rows
from relax_hetero.encoding.block_formats import FILE_FORMATS, block_format, dequantize_rows

DEPTH = 512


def module_of(name, rows):
    builder = relax.BlockBuilder()
    raw = relax.Var("raw", relax.TensorType([rows, block_format(name).row_bytes(DEPTH)], "uint8"))
    with builder.function("main", [raw]):
        with builder.dataflow():
            numbers = builder.emit(rh.op.dequantize_blocks(raw, depth=DEPTH, format=name))
            out = builder.emit_output(relax.op.multiply(numbers, relax.const(2.0, "float32")))
        builder.emit_func_output(out)
    return builder.get()


@pytest.mark.parametrize("name", FILE_FORMATS)
@pytest.mark.sampled(3)
def test_rows_that_only_a_call_knows(name):
    raw = random_rows(name, 3, DEPTH)
    got = rh.vm.VirtualMachine(rh.compile(module_of(name, 3)))["main"](raw).numpy()
    np.testing.assert_array_equal(got, 2 * dequantize_rows(raw, block_format(name), DEPTH))


def test_rows_that_are_constants():
    raw = random_rows("q6_k", 3, DEPTH)
    bound = relax.transform.BindParams("main", {"raw": raw})(module_of("q6_k", 3))
    got = rh.vm.VirtualMachine(rh.compile(bound))["main"]().numpy()
    np.testing.assert_array_equal(got, 2 * dequantize_rows(raw, block_format("q6_k"), DEPTH))
