"""Plans of rows: values kept between passes, and values computed once a row."""

from relax_hetero.encoding.row_program import RowProgram
from relax_hetero.tir.rows.row_plan import plan_rows

SOFTMAX = "r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); multiply(exp(subtract(x0, r0)), divide(1.0, r1))"
NORM = (
    "r0 = mean(add(x0, x1)); r1 = mean(square(subtract(add(x0, x1), r0)));"
    " divide(subtract(add(x0, x1), r0), sqrt(add(r1, 0.5)))"
)


def passes(text, varying, may_keep=True, in_place=None):
    plan = plan_rows(RowProgram.parse(text), frozenset(varying), may_keep, in_place)
    return plan, [(step.kind, str(step.keep), str(step.expression)) for step in plan.passes]


def test_an_exponential_is_computed_once():
    plan, phases = passes(SOFTMAX, [0])
    assert (plan.kept, plan.keeping) == (3, 4)
    assert phases == [
        ("max", "None", "x0"),
        ("sum", "exp_nonpositive(subtract(x0, x1))", "x4"),
        ("", "None", "multiply(x3, x5)"),
    ]
    assert [(number, str(term)) for number, term in plan.passes[2].per_row] == [(5, "divide(1.0, x2)")]


def test_twice_where_the_result_cannot_hold_it():
    _, phases = passes(SOFTMAX, [0], may_keep=False)
    assert [keep for _, keep, _ in phases] == ["None"] * 3
    assert "exp_nonpositive" in phases[1][2] and "exp_nonpositive" in phases[2][2]


def test_a_sum_of_operands_is_kept_and_a_root_is_a_reciprocal():
    plan, phases = passes(NORM, [0, 1])
    assert phases == [
        ("mean", "add(x0, x1)", "x5"),
        ("mean", "None", "square(subtract(x4, x2))"),
        ("", "None", "multiply(subtract(x4, x2), x6)"),
    ]
    assert [str(term) for _, term in plan.passes[2].per_row] == ["rsqrt(add(x3, 0.5))"]


def test_in_place_the_operand_is_the_kept_value():
    _, phases = passes("r0 = mean(x0); add(subtract(x0, r0), x1)", [0, 1], in_place=0)
    assert phases == [("mean", "None", "x3"), ("", "None", "add(subtract(x3, x2), x1)")]


def test_in_place_an_operand_that_is_needed_again_is_not_overwritten():
    text = "r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); add(exp(subtract(x0, r0)), multiply(x0, r1))"
    _, phases = passes(text, [0], in_place=0)
    assert [keep for _, keep, _ in phases] == ["None"] * 3
    _, phases = passes(SOFTMAX, [0], in_place=0)
    assert phases[1] == ("sum", "exp_nonpositive(subtract(x3, x1))", "x4")
    assert phases[2] == ("", "None", "multiply(x3, x5)")


def test_an_exponential_of_other_terms_may_be_large():
    _, phases = passes("r0 = max(x0); r1 = sum(exp(subtract(x1, r0))); divide(x0, r1)", [0, 1])
    assert "exp(subtract(x1" in phases[1][2] and "nonpositive" not in phases[1][2]


def test_row_invariant_terms_are_computed_once():
    plan, phases = passes("r0 = sum(x0); multiply(x0, exp(add(r0, x1)))", [0])
    assert phases[1][2] == "multiply(x0, x5)"
    assert [str(term) for _, term in plan.passes[1].per_row] == ["exp(add(x2, x1))"]


def test_one_value_a_row():
    plan, phases = passes("r0 = sum(square(x0)); sqrt(r0)", [0])
    assert phases == [("sum", "None", "square(x0)"), ("", "None", "x4")]
    assert [str(term) for _, term in plan.passes[1].per_row] == ["sqrt(x1)"]
