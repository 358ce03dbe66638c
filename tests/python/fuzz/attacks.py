"""The kinds of attacks, by name."""

from __future__ import annotations

import importlib

from .harness import Attack

_FOUND = {
    "graphs": "onnx_graphs",
    "arguments": "argument_attacks",
}

KINDS = list(_FOUND)

_FOR_TESTS = {"known": "known_endings"}


def attack_of(kind: str) -> Attack:
    """The attack of a kind; modules are imported when they are asked for, because each child runs only one."""
    attack: Attack = importlib.import_module(f"fuzz.{(_FOUND | _FOR_TESTS)[kind]}").attack
    return attack
