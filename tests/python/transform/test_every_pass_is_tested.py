"""Every pass has tests in the folder that mirrors its stage, which compare a module with the one expected."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from relax_hetero import transform

HERE = Path(__file__).parent
PASSES = {name: each.constructor.__module__.split(".")[2:] for name, each in transform.passes().items()}
# The last is of `outlines`, for regions: it compares functions of Relax.
COMPARES = {"assert_structural_equal", "check_pass", "check"}
# These check or annotate and change no function, so tests have nothing to compare.
ONLY_CHECKS = {"AnnotateGraph", "VerifyEncodings"}


def names_in(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_has_a_module_before_and_one_expected(name):
    *stage, module = PASSES[name]
    used = {file.name: names_in(file) for file in HERE.joinpath(*stage).glob("test_*.py")}
    of_this = {file: names for file, names in used.items() if names & {name, module}}
    assert of_this, f"no test in {HERE.joinpath(*stage)} names {name}"
    compares = name in ONLY_CHECKS or any(names & COMPARES for names in of_this.values())
    assert compares, f"none of {sorted(of_this)} compares a module with an expected one"
