"""The road from a model to the virtual machine's form, as one Sequential."""

from __future__ import annotations

import tvm

from ..transform.dispatch.form_dispatches import FormDispatches
from ..transform.encode.hoist_encodings import HoistEncodings
from ..transform.encode.materialize_encodings import MaterializeEncodings
from ..transform.encode.propagate_encodings import PropagateEncodings
from ..transform.encode.set_encoding import SetEncoding
from ..transform.encode.specialize_encodings import SpecializeEncodings
from ..transform.fuse.form_attention import FormAttention
from ..transform.fuse.form_block_products import FormBlockProducts
from ..transform.fuse.form_rows import FormRows
from ..transform.lower.lower_to_vm import LowerToVM
from ..transform.permute.move_permutes import MovePermutes
from ..transform.placement.realize_vdevice import RealizeVDevice
from ..transform.quantize.sink_dequantize import SinkDequantize
from ..transform.record.donated import UpdateDonated
from ..transform.record.form_command_buffers import FormCommandBuffers
from ..transform.simplify.simplify_convolutions import SimplifyConvolutions


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
