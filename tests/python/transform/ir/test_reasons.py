"""Messages of TVM without what only its authors read."""

import pytest

from relax_hetero.transform.ir.reasons import location_of, reason

OP = 'ir.Op(span=None, name="relax.add", arguments=(ir.ArgumentInfo(name="x1"),), num_inputs=2, support_level=10)'
UNDERLINED = """The shapes do not fit.

Error in pass: CanonicalizeTIRVariables
Location (TVMScript):

@R.function
def main(x: R.Tensor((2, 3), dtype="float32")) -> R.Tensor((2, 3), dtype="float32"):
    y: R.Tensor((2, 3), dtype="float32") = R.add(x, w)
                                           ^^^^^^^^^^^
    return y"""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"In {OP}, the first shape is T.int64(3).", "relax.add: the first shape is 3."),
        ('Check failed: (!ty.IsMissing()) is false: The type of I.GlobalVar("f")', "The type of 'f'"),
        ("InternalError: Check failed: index < size() (3 vs. 1) : Out of bounds", "Out of bounds"),
        (
            "[10:00:00] /src/relax/x.cc:12: Check failed: (false) is false: ",
            "a condition of TVM does not hold (Exception)",
        ),
        ('of R.take(x, metadata["ir.GenericConst"][0])', "of R.take(x, a constant)"),
        ("nvrtc:\nkernel.cu(3): error: no such name\n1 error detected", "kernel.cu(3): error: no such name"),
        (UNDERLINED, "The shapes do not fit."),
        ("", "a condition of TVM does not hold (Exception)"),
        ("x" * 700, "x" * 600 + " …"),
    ],
)
def test_reasons(message, shown):
    assert reason(Exception(message)) == shown


def test_the_variable_that_is_underlined():
    assert location_of(Exception(UNDERLINED)) == "variable 'y' in function 'main': "
    assert location_of(Exception("nothing")) == ""
