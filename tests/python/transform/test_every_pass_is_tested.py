"""Every pass that `relax_hetero.transform` exports has tests of its name, in the folder that mirrors its stage."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from relax_hetero import transform

HERE = Path(__file__).parent
# Public name -> stage and module, for passes; functions and reports begin with a small letter or are classes.
PASSES = {
    name: module.strip(".").split(".")
    for name, module in transform._EXPORTS.items()
    if name[0].isupper() and not name.endswith(("Report", "Entry"))
}
# The second is of `outlines`, for regions: it compares functions of Relax.
COMPARES = {"assert_structural_equal", "check"}
# These change nothing, or names only: there is no module to expect.
ONLY_CHECKS = {"VerifyEncodings"}


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_has_a_module_before_and_one_expected(name):
    stage, module = PASSES[name]
    file = HERE / stage / f"test_{module}.py"
    assert file.is_file(), f"{file.relative_to(HERE)} should hold the tests of {name}"
    if name in ONLY_CHECKS:
        return
    assert COMPARES & names_in(file), f"{file.name} compares no module with an expected one"


def names_in(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}
