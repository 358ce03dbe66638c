"""The road from a model to the virtual machine's form, as one Sequential."""

from __future__ import annotations

import tvm

from ..transform.donated import UpdateDonated
from ..transform.form_attention import FormAttention
from ..transform.form_block_products import FormBlockProducts
from ..transform.form_command_buffers import FormCommandBuffers
from ..transform.form_dispatches import FormDispatches
from ..transform.form_rows import FormRows
from ..transform.hoist_encodings import HoistEncodings
from ..transform.lower_to_vm import LowerToVM
from ..transform.materialize_encodings import MaterializeEncodings
from ..transform.move_permutes import MovePermutes
from ..transform.propagate_encodings import PropagateEncodings
from ..transform.realize_vdevice import RealizeVDevice
from ..transform.set_encoding import SetEncoding
from ..transform.simplify_convolutions import SimplifyConvolutions
from ..transform.sink_dequantize import SinkDequantize
from ..transform.specialize_encodings import SpecializeEncodings


def get_pipeline(command_buffers: bool = True) -> tvm.transform.Pass:
    """Place, encode, form dispatches, lower: what ``rh.compile`` runs, for ``tvm.compile`` and for looking at stages.

    Parameters
    ----------
    command_buffers : bool
        Whether runs of kernels on one device become command buffers.

    Returns
    -------
    tvm.transform.Sequential
        Each pass can be run alone, and does nothing to a module that has been through it.
    """
    return tvm.transform.Sequential(all_passes(command_buffers), name="relax_hetero")


def all_passes(command_buffers: bool, apart: bool = False) -> list[tvm.transform.Pass]:
    """The passes of `get_pipeline`; `apart` is that of `FormCommandBuffers`."""
    record = [FormCommandBuffers(apart)] if command_buffers else []
    return [*passes_to_dispatches(), *record, UpdateDonated(), LowerToVM()]


def passes_to_dispatches() -> list[tvm.transform.Pass]:
    """The passes after which every call of a kernel, and the device it runs on, is there to see."""
    encode = [SetEncoding(), PropagateEncodings(), FormRows(), SpecializeEncodings()]
    store = [HoistEncodings(), MaterializeEncodings(), MovePermutes()]
    form = [SimplifyConvolutions(), FormBlockProducts(), FormAttention()]
    return [RealizeVDevice(), SinkDequantize(), *form, *encode, *store, FormDispatches()]
