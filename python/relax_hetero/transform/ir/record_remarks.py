"""RecordRemarks: remarks of the passes from here on stay with the module, as data.

Before::

    y = R.matmul(x, w)

After, the same with::

    I.module_attrs({"relax_hetero.fusions": '{"dispatches": [], "missed": []}'})

A pass knows more than its result shows: the reason of a value's device, a device's choice of layouts, missed fusions.
In a module that records remarks, each pass adds its own to one record (`remarks.Remarks`), which `rh.compile` puts
into the executable's metadata and ``relax-hetero explain`` prints.

Assumes nothing. A second run changes nothing.
"""

from __future__ import annotations

import tvm

from .declare import declare_pass
from .remarks import records_remarks, with_remarks
from .reports import FusionReport


def record_remarks(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    return mod if records_remarks(mod) else with_remarks(mod, fusions=FusionReport())


RecordRemarks = declare_pass("RecordRemarks", record_remarks)
