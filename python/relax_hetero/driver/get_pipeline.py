"""`rh.get_pipeline`: the pipeline for ``tvm.compile``, whose guard this package installs."""

from __future__ import annotations

import tvm

from ..transform.pipeline import pipeline_steps


def get_pipeline(command_buffers: bool = True) -> tvm.transform.Pass:
    """The passes of ``rh.compile`` as one pass, for ``tvm.compile`` and for looking at stages.

    Parameters
    ----------
    command_buffers : bool
        Whether runs of kernels on one device become command buffers.

    Returns
    -------
    tvm.transform.Sequential
        Each pass can be run alone, and does nothing to a module that has been through it.
    """
    steps = pipeline_steps(command_buffers, stock=True)
    return tvm.transform.Sequential([step.run for step in steps], name="relax_hetero")
