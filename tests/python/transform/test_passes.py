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
# These change nothing, or names only: there is no module to expect.
ONLY_CHECKS = {"VerifyEncodings"}


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_has_a_module_before_and_one_expected(name):
    stage, module = PASSES[name]
    file = HERE / stage / f"test_{module}.py"
    assert file.is_file(), f"{file.relative_to(HERE)} should hold the tests of {name}"
    if name in ONLY_CHECKS:
        return
    called = {node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "") for node in _functions(file)}
    assert "assert_structural_equal" in called, f"{file.name} compares no module with an expected one"


def _functions(file: Path) -> list[ast.expr]:
    return [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
