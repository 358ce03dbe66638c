"""Short texts for targets."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ...artifact.metadata import DeviceSpec


def target_text(target: str, features: Sequence[str] | None = None) -> str:
    """Format a target as its kind and a CPU's instructions or a GPU's architecture: ``llvm AVX2``, ``cuda sm_90``.

    `target`: target as JSON, or other text, which stays as it is; `features`: LLVM's names of a CPU's features, by
    default those that an installed LLVM gives.
    """
    from ...target.instruction_names import instruction_names
    from ...vm.device.cpu_features import with_features  # imports TVM, which --help does not need

    try:
        fields = json.loads(target)
        kind, processor = fields["kind"], fields.get("mcpu", fields.get("arch", ""))
        spec = with_features(DeviceSpec(target, cpu_features=None if features is None else tuple(features)))
        names = instruction_names(spec.cpu_features or ())
        if names and spec.numa_node is not None:
            names = (*names, f"NUMA node {spec.numa_node}")
    except (AttributeError, KeyError, TypeError, ValueError):
        return target
    return f"{kind} {', '.join(names) or processor}".strip()
