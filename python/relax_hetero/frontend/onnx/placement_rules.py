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

# Pattern -> device in order of precedence, or pairs of them.
PlacementRules: TypeAlias = "Mapping[str, VDeviceSpec] | Iterable[tuple[str, VDeviceSpec]]"

_MAX_NEAR_MISSES = 3
# One character in brackets matches itself: the escape for names that contain wildcards.
_BRACKETED_CHARACTER = re.compile(r"\[([^!])\]")
_WITHOUT_WILDCARD = re.compile(rf"(?:[^*?\[]|{_BRACKETED_CHARACTER.pattern})*")


def assign_devices(
    nodes: list[NodeInfo],  # including those nested in subgraphs and function bodies
    # Case-sensitive globs with ``*`` (crosses slashes), ``?`` and ``[…]``. A pattern matches a node's name or op type,
    # or those of an enclosing call of a model's function. A name that contains ``[`` matches itself.
    rules: PlacementRules,
    vdevices: list[tvm.relax.VDevice],  # devices among which device strings are looked up
) -> dict[str, tvm.relax.VDevice]:
    """Assign each node the device of the first rule that matches it, or the default device.

    Returns the device of each node by its name. Raises FrontendError if a pattern matches no node, or the rules are not
    pairs of a pattern and a device, and VDeviceError if a device is not among `vdevices`.
    """
    pairs = [(pattern, lookup(device, vdevices)) for pattern, device in rule_pairs(rules)]
    patterns = Patterns(pattern for pattern, _ in pairs)
    all_nodes = list(walk_nodes(nodes))
    matched: set[int] = set()
    devices: dict[str, tvm.relax.VDevice] = {}
    for node in all_nodes:
        hits = patterns.matching((node.name, *node.aliases))
        matched.update(hits)
        devices[node.name] = pairs[min(hits)][1] if hits else default_vdevice(vdevices)
    for index, (pattern, _) in enumerate(pairs):
        if index not in matched:
            raise FrontendError(_unmatched_message(pattern, all_nodes))
    return devices


def matching_patterns(nodes: list[NodeInfo], rules: PlacementRules) -> dict[str, str]:
    """Unique node name -> the first pattern that matches it, for nodes that match any."""
    texts = [pattern for pattern, _ in rule_pairs(rules)]
    patterns = Patterns(texts)
    deciding: dict[str, str] = {}
    for node in walk_nodes(nodes):
        hits = patterns.matching((node.name, *node.aliases))
        if hits:
            deciding[node.name] = texts[min(hits)]
    return deciding


def rule_pairs(rules: PlacementRules) -> list[tuple[str, VDeviceSpec]]:
    """Check rules and convert them to pairs of a pattern and a device; FrontendError if malformed."""
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


class Patterns:
    """Patterns, matched as globs or literally.

    Patterns are looked up by their text before the first wildcard, since a placement may name each of thousands of
    nodes.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._exact: dict[str, set[int]] = {}
        self._globs: dict[str, list[tuple[int, re.Pattern[str]]]] = {}
        for index, pattern in enumerate(patterns):
            self._exact.setdefault(pattern, set()).add(index)
            if _WITHOUT_WILDCARD.fullmatch(pattern):
                self._exact.setdefault(_BRACKETED_CHARACTER.sub(r"\1", pattern), set()).add(index)
            else:
                prefix = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
                self._globs.setdefault(prefix, []).append((index, re.compile(translate(pattern))))
        self._lengths = sorted({len(prefix) for prefix in self._globs})

    def matching(self, names: Iterable[str]) -> set[int]:
        """The indices of the patterns that match any of these names."""
        matches: set[int] = set()
        for name in names:
            matches |= self._exact.get(name, set())
            for length in self._lengths:
                candidates = self._globs.get(name[:length], ())
                matches.update(index for index, glob in candidates if glob.match(name))
        return matches


def _unmatched_message(pattern: str, nodes: list[NodeInfo]) -> str:
    names = list(dict.fromkeys(node.name for node in nodes))
    types = list(dict.fromkeys(node.op_type for node in nodes))
    text = pattern.strip("*")
    near = difflib.get_close_matches(text, [*names, *types], n=_MAX_NEAR_MISSES, cutoff=0.5)
    folded = text.lower()
    near += [name for name in (*types, *names) if folded and folded in name.lower() and name not in near]
    if near:
        hint = f"near misses: {', '.join(map(repr, near[:_MAX_NEAR_MISSES]))}"
    else:
        hint = f"its {len(nodes)} nodes have the op types {', '.join(types) or 'none'}"
    return f"the placement pattern {pattern!r} matches no node's name or op type; {hint}"
