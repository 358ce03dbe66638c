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
# A letter in brackets stands for itself, which is how a name with a wildcard in it is written as a pattern.
_ONE_OF_ONE = re.compile(r"\[([^!])\]")
_PLAIN = re.compile(rf"(?:[^*?\[]|{_ONE_OF_ONE.pattern})*")


def assign_devices(
    nodes: list[NodeInfo], rules: PlacementRules, vdevices: list[tvm.relax.VDevice]
) -> dict[str, tvm.relax.VDevice]:
    """The device of every node: of the first rule that matches it, else the default one.

    Parameters
    ----------
    nodes : list of NodeInfo
        Nodes in subgraphs and in bodies of functions are looked at one by one.
    rules : PlacementRules
        Patterns are case-sensitive; ``*``, ``?`` and ``[…]`` as in file names (``*`` crosses slashes). A pattern
        matches a node's name, its op type, and those of the call of a model's own function that the node is in. A name
        that happens to contain ``[`` matches itself.
    vdevices : list of tvm.relax.VDevice
        Devices that device strings are looked up in.

    Returns
    -------
    dict of str to tvm.relax.VDevice
        Unique node name -> vdevice.

    Raises
    ------
    FrontendError
        If a pattern matches no node, or the rules are not pairs of a pattern and a device.
    VDeviceError
        If a device is not among `vdevices`.
    """
    pairs = [(pattern, lookup(device, vdevices)) for pattern, device in rule_pairs(rules)]
    patterns = _Patterns(pattern for pattern, _ in pairs)
    everything = list(walk_nodes(nodes))
    matched: set[int] = set()
    devices: dict[str, tvm.relax.VDevice] = {}
    for node in everything:
        hits = patterns.matching((node.name, *node.aliases))
        matched.update(hits)
        devices[node.name] = pairs[min(hits)][1] if hits else default_vdevice(vdevices)
    for index, (pattern, _) in enumerate(pairs):
        if index not in matched:
            raise FrontendError(_unmatched(pattern, everything))
    return devices


def matching_patterns(nodes: list[NodeInfo], rules: PlacementRules) -> dict[str, str]:
    """Unique node name -> the pattern that decides where it goes, of the nodes that some rule matches."""
    texts = [pattern for pattern, _ in rule_pairs(rules)]
    patterns = _Patterns(texts)
    found: dict[str, str] = {}
    for node in walk_nodes(nodes):
        hits = patterns.matching((node.name, *node.aliases))
        if hits:
            found[node.name] = texts[min(hits)]
    return found


def rule_pairs(rules: PlacementRules) -> list[tuple[str, VDeviceSpec]]:
    """Rules as pairs of a pattern and a device; FrontendError for anything else."""
    if not isinstance(rules, Iterable):
        raise FrontendError(f"placement is {rules!r}; expected a mapping of patterns to devices, or a list of pairs")
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            example = "placement={'*': 'cuda:0'} or [('*', 'cuda:0')]"
            raise FrontendError(f"a placement rule is a pattern (a string) and a device, got {pair!r}; write {example}")
        if isinstance(pair[1], (list, tuple)):
            raise FrontendError(
                f"placement names {pair[1]!r} as the device of pattern {pair[0]!r}: expected one device for each "
                "pattern, {'pattern': 'device'}"
            )
    return [(pattern, device) for pattern, device in pairs]


class _Patterns:
    """Which of several patterns match a name, as globs or letter by letter.

    Patterns without a wildcard are looked up, because a placement may name each of a model's thousands of nodes.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: dict[str, set[int]] = {}
        self._globs: list[tuple[int, re.Pattern[str]]] = []
        for index, pattern in enumerate(patterns):
            self._exact.setdefault(pattern, set()).add(index)
            if _PLAIN.fullmatch(pattern):
                self._exact.setdefault(_ONE_OF_ONE.sub(r"\1", pattern), set()).add(index)
            else:
                self._globs.append((index, re.compile(translate(pattern))))

    def matching(self, names: Iterable[str]) -> set[int]:
        """The positions of the patterns that match any of these names."""
        found: set[int] = set()
        for name in names:
            found |= self._exact.get(name, set())
            found.update(index for index, glob in self._globs if glob.match(name))
        return found


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
