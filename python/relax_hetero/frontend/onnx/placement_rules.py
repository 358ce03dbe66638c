"""Placement rules of an ONNX model: glob patterns over node names and op types, each naming a device."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import translate
from typing import TYPE_CHECKING, TypeAlias

from ...errors import FrontendError
from ...target.vdevice import default_vdevice, lookup
from .node_names import NodeInfo, walk_nodes

if TYPE_CHECKING:
    import tvm

    from ...target.vdevice import VDeviceSpec

# Ordered: pattern -> device, or the same as pairs.
PlacementRules: TypeAlias = "Mapping[str, VDeviceSpec] | Iterable[tuple[str, VDeviceSpec]]"

_NEAR_MISSES = 3


def assign_devices(
    nodes: list[NodeInfo], rules: PlacementRules, vdevices: list[tvm.relax.VDevice]
) -> dict[str, tvm.relax.VDevice]:
    """The device of every node: of the first rule that matches it, else the default one.

    Parameters
    ----------
    nodes: Nodes in subgraphs and in bodies of functions are looked at one by one.
    rules: Patterns are case-sensitive; ``*``, ``?`` and ``[…]`` as in file names (``*`` crosses slashes). A pattern
        matches a node's name, its op type, and those of the call of a model's own function that the node is in. A name
        that happens to contain ``[`` matches itself.
    vdevices: What device strings are looked up in.

    Returns
    -------
    Unique node name -> vdevice.

    Raises
    ------
    FrontendError: If a pattern matches no node, or the rules are not pairs of a pattern and a device.
    VDeviceError: If a device is not among `vdevices`.
    """
    compiled = [(pattern, _matcher(pattern), lookup(device, vdevices)) for pattern, device in _pairs(rules)]
    everything = list(walk_nodes(nodes))
    matched: set[str] = set()
    devices: dict[str, tvm.relax.VDevice] = {}
    for node in everything:
        names = (node.name, *node.aliases)
        hits = [(pattern, device) for pattern, matches, device in compiled if any(map(matches, names))]
        matched.update(pattern for pattern, _ in hits)
        devices[node.name] = hits[0][1] if hits else default_vdevice(vdevices)
    for pattern, _, _ in compiled:
        if pattern not in matched:
            raise FrontendError(_unmatched(pattern, everything))
    return devices


def matching_patterns(nodes: list[NodeInfo], rules: PlacementRules) -> dict[str, str]:
    """Unique node name -> the pattern that decides where it goes, of the nodes that some rule matches."""
    compiled = [(pattern, _matcher(pattern)) for pattern, _ in _pairs(rules)]
    found: dict[str, str] = {}
    for node in walk_nodes(nodes):
        hits = (pattern for pattern, matches in compiled if any(map(matches, (node.name, *node.aliases))))
        pattern = next(hits, None)
        if pattern is not None:
            found[node.name] = pattern
    return found


def _pairs(rules: PlacementRules) -> list[tuple[str, VDeviceSpec]]:
    if not isinstance(rules, Iterable):
        raise FrontendError(f"placement is {rules!r}; expected a mapping of patterns to devices, or a list of pairs")
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise FrontendError(f"a placement rule is a pattern (a string) and a device, got {pair!r}")
    return [(pattern, device) for pattern, device in pairs]


class _matcher:  # noqa: N801 (used like a function)
    """Whether a name matches a pattern, as a glob or letter by letter."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._glob = re.compile(translate(pattern))

    def __call__(self, name: str) -> bool:
        return name == self._pattern or self._glob.match(name) is not None


def _unmatched(pattern: str, nodes: list[NodeInfo]) -> str:
    names = list(dict.fromkeys(node.name for node in nodes))
    types = list(dict.fromkeys(node.op_type for node in nodes))
    bare = pattern.strip("*")
    near = difflib.get_close_matches(bare, [*names, *types], n=_NEAR_MISSES, cutoff=0.5)
    folded = bare.lower()
    near += [name for name in (*types, *names) if folded and folded in name.lower() and name not in near]
    if near:
        hint = f"near misses: {', '.join(map(repr, near[:_NEAR_MISSES]))}"
    else:
        hint = f"its {len(nodes)} nodes have the op types {', '.join(types) or 'none'}"
    return f"the placement pattern {pattern!r} matches no node's name or op type; {hint}"
