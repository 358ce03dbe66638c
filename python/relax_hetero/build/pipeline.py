"""The road from a model to the virtual machine's form, as one Sequential."""

from __future__ import annotations

import tvm

from ..transform.form_dispatches import FormDispatches
from ..transform.lower_to_vm import LowerToVM
from ..transform.realize_vdevice import RealizeVDevice


def get_pipeline() -> tvm.transform.Pass:
    """Place, form dispatches, lower: what ``rh.compile`` runs, for ``tvm.compile`` and for looking at stages.

    Returns
    -------
    tvm.transform.Sequential
        Each pass can be run alone, and does nothing to a module that has been through it.
    """
    return tvm.transform.Sequential([RealizeVDevice(), FormDispatches(), LowerToVM()], name="relax_hetero")
