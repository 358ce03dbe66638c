"""KeepFindings: what the passes find from here on stays with the module, as data.

Before::

    y = R.matmul(x, w)

After, the same with::

    I.module_attrs({"relax_hetero.fusions": '{"dispatches": [], "declined": []}'})

A pass finds more than it writes: why a value is where it is, which layout a device chose, what was not fused and why.
In a module that keeps findings, each pass adds its own to one record (`findings.Findings`), which `rh.compile` puts
into the executable's metadata and ``relax-hetero explain`` prints.

Assumes nothing. A second run changes nothing.
"""

from __future__ import annotations

import tvm

from .declare import declare_pass
from .findings import keeps_findings, with_findings
from .reports import FusionReport


def keep_findings(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    return mod if keeps_findings(mod) else with_findings(mod, fusions=FusionReport())


KeepFindings = declare_pass("KeepFindings", keep_findings)
