"""Experts in panels of CPUs as fragments of GPUs, by the interpreter of kernels: every format, ragged sizes."""

from __future__ import annotations

import numpy as np
import pytest

from encoding.random_blocks import random_rows
from gpu_interpreter import run
from relax_hetero.encoding.block_formats import FILE_FORMATS
from relax_hetero.encoding.block_panels import BlockSource, Panels
from relax_hetero.encoding.block_weights import Fragments
from relax_hetero.encoding.problem import PanelFragmentsProblem
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.matmul.panel_fragments import panel_fragments_kernel
from tir.cuda.gpu_runs import needs_gpu, run_on_gpu
from tir.cuda.matmul.test_block_product_on_gpus import GPU, OLD_GPU
from tir.matmul.block_problems import plain

EXPERTS = 3


def check(name, columns, depth, width, gpu=GPU, is_on_gpu=False):
    """Compare the parts of the fragments with those that are packed from the file's bytes."""
    form = FILE_FORMATS[name]
    source = BlockSource((random_rows(name, EXPERTS * columns, depth),), form, depth)
    (panels,) = Panels(width).pack(source, EXPERTS)
    for part, want in enumerate(Fragments().pack(source, EXPERTS)):
        assert str(want.dtype) == Fragments().part_types(form)[part]
        problem = PanelFragmentsProblem(
            plain(panels.shape, "uint8", Panels.index_map),
            plain(want.shape, str(want.dtype), ("a", "b", "c", "d")),
            form,
            depth,
            columns,
            part,
        )
        function = panel_fragments_kernel(problem, gpu)
        assert is_one_launch(function)
        got = np.full(want.shape, 85, want.dtype)
        if is_on_gpu:
            got = run_on_gpu(function, [panels], want.shape, str(want.dtype))
        else:
            run(function, panels, got)
        np.testing.assert_array_equal(got.view(f"u{want.itemsize}"), want.view(f"u{want.itemsize}"), f"part {part}")


def depth_of(name):
    """A depth that is not a multiple of all chunks."""
    form = FILE_FORMATS[name]
    return {1: 24, 32: 96}.get(form.superblock_size, 2 * form.superblock_size)


@pytest.mark.parametrize("name", FILE_FORMATS)
@pytest.mark.parametrize("width", [16, 32])
def test_formats(name, width):
    check(name, 48, depth_of(name), width)


def test_older_gpus():
    check("q4_k", 16, 256, 32, OLD_GPU)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", FILE_FORMATS)
def test_on_a_gpu(name):
    check(name, 48, depth_of(name), 32, is_on_gpu=True)
