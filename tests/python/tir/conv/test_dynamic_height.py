"""Direct convolutions of images whose sizes only a call knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from marks import in_turns
from relax_hetero.encoding.problem import ConvProblem, Window
from relax_hetero.errors import EncodingError
from relax_hetero.tir.conv.convolution import conv_kernel
from seeds import fresh_rng
from tir.conv.test_conv_low_precision import TYPES
from tir.convolutions_of import assert_near, conv_problem, random_operands, reference, with_epilogue
from tir.kernel_runs import LOW_PRECISION_TARGETS, NAMES, cpu_named, kernel, poisoned, runs_here
from tir.microkernel.test_fp16_partial_sums import HALVES, needs_avx512, short_sums_cpu

pytestmark = pytest.mark.sampled(14)

SAME = Window(3, before=1, after=1)
CASES = {
    # channels, windows, groups, sizes of images
    "same": ((5, 40), (SAME, SAME), 1, ((9, 31), (1, 1), (3, 2), (0, 5), (4, 70))),
    "image": ((3, 20), (Window(7, 2, 1, 3, 3), Window(7, 2, 1, 3, 3)), 1, ((9, 33), (2, 1), (12, 30))),
    "sequence": ((6, 21), (Window(5, 2, 1, 2, 2),), 1, ((1,), (2,), (40,), (129,))),
    "dilated": ((4, 33), (Window(3, 1, 5, 5, 5),), 1, ((3,), (9,), (64,))),
    "asymmetric": ((3, 40), (Window(2, 1, 1, 0, 1), Window(4, 3, 1, 3, 0)), 1, ((9, 31), (2, 1))),
    "more padding than data": ((5, 20), (Window(4, 1, 1, 3, 3),), 1, ((1,), (2,), (7,))),
    "no padding": ((5, 20), (Window(4, 3),), 1, ((4,), (6,), (50,))),
    "pointwise": ((7, 40), (Window(1), Window(1)), 1, ((5, 9), (1, 1), (0, 3))),
    "pointwise, some skipped": ((7, 40), (Window(1, 2), Window(1, 3)), 1, ((5, 9), (1, 1))),
    "groups": ((32, 64), (Window(5, before=2, after=2),), 2, ((1,), (30,))),
    "depthwise": ((37, 37), (Window(5, before=2, after=2),), 37, ((1,), (3,), (40,))),
    "depthwise image": ((20, 20), (SAME, Window(3, 2, 1, 1, 1)), 20, ((4, 9), (1, 1), (6, 40))),
    "few channels a group": ((12, 24), (SAME, SAME), 6, ((4, 9), (1, 2))),
    "volume": ((4, 20), (SAME, Window(2, 2), SAME), 1, ((5, 6, 7), (1, 2, 1))),
}


def unknown(problem: ConvProblem) -> ConvProblem:
    """The same of images of any size."""
    spatial = range(len(problem.windows))
    data = replace(problem.data, shape=(*problem.data.shape[:2], *(f"x{d}" for d in spatial)))
    result = replace(problem.result, shape=(*problem.result.shape[:2], *(f"y{d}" for d in spatial)))
    return replace(problem, data=data, result=result)


def check_images_of_any_size(
    name: str, case: str, tmp_path: Path, types: tuple[str, str, str] = ("float32",) * 3
) -> None:
    channels, windows, groups, images = CASES[case]
    example = conv_problem(name, channels, images[0], windows, groups=groups, dtype=types)
    compute = kernel(conv_kernel(unknown(example), cpu_named(name)), name, tmp_path)
    for extents in images:
        problem = conv_problem(name, channels, extents, windows, groups=groups, dtype=types)
        data, weight = random_operands(problem, fresh_rng())
        shape = problem.result.shape
        out = poisoned((shape[0], *shape[2:], shape[1]), problem.result.dtype)
        stored = [problem.data.layout.pack(data), problem.weight.layout.pack(weight)]
        compute(*map(tvm.runtime.tensor, stored), out)
        actual = problem.result.layout.unpack(out.numpy(), shape)
        assert_near(problem, actual, reference(problem, data, weight))


@pytest.mark.parametrize(("case", "name"), in_turns(CASES, NAMES))
def test_images_of_any_size(name: str, case: str, tmp_path: Path) -> None:
    check_images_of_any_size(name, case, tmp_path)


@pytest.mark.parametrize(("case", "kind"), in_turns(CASES, TYPES))
@pytest.mark.parametrize("name", [*filter(runs_here, LOW_PRECISION_TARGETS), *NAMES])
def test_bytes_and_halves(name: str, case: str, kind: str, tmp_path: Path) -> None:
    if name == "c" and kind == "f16":
        pytest.skip("TVM writes no C of float16")
    check_images_of_any_size(name, case, tmp_path, TYPES[kind])


@needs_avx512
@pytest.mark.parametrize("case", ["same", "image", "sequence", "groups"])
def test_fp16_partial_sums(case: str, tmp_path: Path) -> None:
    channels, windows, groups, images = CASES[case]
    cpu = short_sums_cpu()
    compute = kernel(
        conv_kernel(unknown(conv_problem(cpu, channels, images[0], windows, groups, dtype=HALVES)), cpu),
        "avx512",
        tmp_path,
    )
    for extents in images:
        problem = conv_problem(cpu, channels, extents, windows, groups, dtype=HALVES)
        for scale, tolerance in ((1.0, 3e-3), (1e3, 1e-5)):
            arrays = [
                (array.astype("float32") * scale).astype("float16") for array in random_operands(problem, fresh_rng())
            ]
            want = reference(problem, *arrays)
            out = poisoned(problem.result.layout.packed_shape(want.shape), "float32")
            stored = (operand.layout.pack(array) for operand, array in zip(problem.parameters, arrays, strict=False))
            compute(*map(tvm.runtime.tensor, stored), out)
            error = np.linalg.norm(problem.result.layout.unpack(out.numpy(), want.shape) - want)
            assert error <= tolerance * np.linalg.norm(want), (extents, scale)


def test_padding_is_left_out_and_an_epilogue_reads_each_place_once(tmp_path: Path) -> None:
    window = Window(5, before=2, after=2)
    problem = with_epilogue(conv_problem(NAMES[0], (3, 20), (23,), (window,)), "relu(add(add(x0, x1), x2))", "n", "bny")
    data, weight, bias, more = random_operands(problem, fresh_rng())
    data[:, :, 11] = np.inf
    symbolic = unknown(problem)
    extra = problem.epilogue.operands[1]
    shown = replace(
        extra,
        shape=tuple("y0" if name == "y0" else size for name, size in zip(extra.index_map, extra.shape, strict=True)),
    )
    epilogue = replace(problem.epilogue, operands=(problem.epilogue.operands[0], shown))
    compute = kernel(conv_kernel(replace(symbolic, epilogue=epilogue), cpu_named(NAMES[0])), NAMES[0], tmp_path)
    out = tvm.runtime.tensor(extra.layout.pack(more))  # the result lies over the operand
    stored = [problem.data.layout.pack(data), problem.weight.layout.pack(weight), bias]
    compute(*map(tvm.runtime.tensor, stored), out, out)
    with np.errstate(invalid="ignore"):
        want = np.maximum(reference(problem, data, weight) + bias.reshape(1, -1, 1) + more, 0)
    actual = problem.result.layout.unpack(out.numpy(), problem.result.shape)
    finite = [place for place in range(23) if abs(place - 11) > 2]
    np.testing.assert_allclose(actual[..., finite], want[..., finite], rtol=1e-4, atol=1e-4)
    assert not np.isfinite(actual[..., 9:14]).all()


def test_channels_are_known() -> None:
    problem = conv_problem("avx512", (8, 32), (9,), (Window(3),))
    data = replace(problem.data, shape=(1, "c", 9))
    with pytest.raises(EncodingError, match="found channels .*'c', .* only batch and images may be symbolic"):
        conv_kernel(replace(problem, data=data), cpu_named("avx512"))
