"""Documentation of every pass: its name, what it does, what it assumes, a program before and after."""

import inspect
import re

import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform.ir.declare import PassDeclaration, declare_pass, declared_passes

PASSES = rh.transform.passes()
OPTIONS = {"ToMixedPrecision": ("bfloat16",), "UpdateVDevice": (rh.VDevice("llvm"),)}


@ir_module()
def Empty(x: R.Tensor((4,), "float32")):
    return x


@pytest.mark.parametrize("name", PASSES)
def test_its_text_says_what_it_does_and_assumes_and_shows_before_and_after(name):
    declaration, constructor = PASSES[name], getattr(rh.transform, name)
    text = inspect.getdoc(constructor)
    assert text == declaration.text and text.startswith(f"{name}: {declaration.summary}")
    assert re.search(r"^Before\b.*::$", text, re.MULTILINE) and re.search(r"^After\b", text, re.MULTILINE)
    assert re.search(r"^Assumes ", text, re.MULTILINE)
    assert re.search(
        r"second\s+run|returned\s+as\s+(it|they)", text
    )  # what becomes of a module that has been through it
    sections = re.findall(r"^(\w+)\n-+$", text, re.MULTILINE)
    assert [each for each in sections if each != "Raises"] == ["Parameters"] * bool(declaration.options) + ["Returns"]
    for option in declaration.options:
        assert re.search(rf"^{option} : ", text, re.MULTILINE), option


@pytest.mark.parametrize("name", PASSES)
def test_its_constructor_makes_a_pass_of_its_name(name):
    constructor = getattr(rh.transform, name)
    instance = constructor(*OPTIONS.get(name, ()))
    assert isinstance(instance, tvm.transform.Pass) and instance.info.name == name == constructor.__name__
    assert list(inspect.signature(constructor).parameters) == list(PASSES[name].options)
    with pytest.raises(TypeError, match=name):
        constructor(no_such_option=1)


def test_passes_that_are_declared_are_exported_and_the_other_way_round():
    ours = {name: d for name, d in declared_passes().items() if d.constructor.__module__.startswith("relax_hetero.")}
    assert ours == PASSES
    assert set(PASSES) <= set(rh.transform.__all__) <= set(dir(rh.transform))


def test_a_pass_is_found_by_name():
    match = rh.transform.find_pass("FormCommandBuffers")
    assert isinstance(match, PassDeclaration) and match.options == {"separate_kernels": False}
    with pytest.raises(KeyError, match="'FormRow'; near names: FormRows"):
        rh.transform.find_pass("FormRow")


def with_mark(mod: tvm.IRModule, mark: str, count: int = 1) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
        Any.

    mark : str
        Of the attribute.
    count : int
        Its value.

    Returns
    -------
    tvm.IRModule

    Raises
    ------
    ValueError
        At once, for no mark.
    """
    return mod.with_attr(mark, count)


def test_how_a_pass_is_declared():
    def check(mark, count=1):
        if not mark:
            raise ValueError("no mark")

    SetMark = declare_pass("SetMark", with_mark, check)
    assert SetMark("here", count=3)(Empty).attrs["here"] == 3
    assert str(inspect.signature(SetMark)).startswith("(mark: str, count: int = 1)")
    assert declared_passes()["SetMark"].options == {"mark": inspect.Parameter.empty, "count": 1}
    text = inspect.getdoc(SetMark)
    assert text.endswith("Raises\n------\nValueError\n    At once, for no mark.") and "mod :" not in text
    assert "Parameters\n----------\nmark : str\n    Of the attribute.\ncount : int\n    Its value.\n\nReturns" in text
    with pytest.raises(ValueError, match="no mark"):
        SetMark("")
    with pytest.raises(TypeError, match="SetMark: missing a required argument: 'mark'"):
        SetMark()
