"""Rows of Relax ops: ops that TVM knows, and rules that exist."""

from __future__ import annotations

import tvm

from relax_hetero.op.traits import TRAITS, traits_of
from relax_hetero.transform import check_sizes, move_permutes


def test_rows_are_of_ops_that_exist() -> None:
    assert set(TRAITS) <= set(tvm.ir.Op.list_op_names()) | {"relax.wrap_param", "relax.stop_lift_params"}


def test_rules_and_rows_name_each_other() -> None:
    assert {traits.permute for traits in TRAITS.values()} == {"", *move_permutes.BY_NAME}
    assert {traits.sizes for traits in TRAITS.values()} == {"", *check_sizes.RULES}


def test_roles_of_low_precision_are_known() -> None:
    assert {traits.precision for traits in TRAITS.values()} == {"", "product", "moved", "stored", "exact"}


def test_ops_that_move_elements_ignore_values() -> None:
    assert all(traits.ignores_numbers and traits.is_exact for traits in TRAITS.values() if traits.moves)


def test_an_unknown_op_has_no_traits() -> None:
    assert traits_of(None) == traits_of("relax.nothing") and not traits_of(None).needs_no_kernel
    assert "relax.hetero.mish" in TRAITS and traits_of("relax.hetero.mish").is_elementwise
