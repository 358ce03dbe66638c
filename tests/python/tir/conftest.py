"""Kernels are compiled with the passes that the driver uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tvm

from relax_hetero.driver.link.parallel_codegen import COMPACTION, IDLE_ON_CPUS


@pytest.fixture(scope="module", autouse=True)
def passes_of_driver(request: pytest.FixtureRequest) -> Iterator[None]:
    """``tvm.compile`` leaves out TVM's compaction of temporaries, which takes most of its time for unrolled kernels.

    It also leaves out passes that change nothing in kernels of CPUs, but in folders where code of GPUs is compiled.
    """
    idle = () if {"cuda", "commands"} & set(request.path.parts) else IDLE_ON_CPUS
    with tvm.transform.PassContext(disabled_pass=[COMPACTION, *idle]):
        yield
