"""TVMScript's own look-up is strict once `relax_hetero.op` is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tvm
from tvm.error import DiagnosticError
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import VDeviceError
from relax_hetero.op import strict_tvmscript
from relax_hetero.target.vdevice import same_object, vdevices_of

LIST = 'I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("c", 1), I.vdevice("llvm", 0, "shared")]})'
AVAILABLE = "available: llvm:0, c:0, llvm:1"
WRONG = ["metal", "metal:0", "llvm:2", "llvm:-1", "llvm:", "llvm:x", "", " llvm", "vdevice:3", "cpu", "llvm:0:shared"]
SOURCE = """
# from tvm.script import ir as I
# from tvm.script import relax as R

@I.ir_module
class Module:
    {list}
    @R.function
    def main(x: R.Tensor((2,), "float32"{parameter})){result}:
        y = {value}
        return y
"""


def parse(value="R.add(x, x)", parameter="", result="", vdevices=LIST) -> tvm.IRModule:
    return tvm.script.from_source(SOURCE.format(list=vdevices, value=value, parameter=parameter, result=result))


def refused(message: str, **source: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        parse(**source)
    assert message in str(error.value)


@pytest.mark.parametrize("name", WRONG)
class TestWrongName:
    def test_parameter(self, name):
        refused(AVAILABLE, parameter=f", {name!r}")

    def test_parameter_error_names_it(self, name):
        refused(repr(name), parameter=f", {name!r}")

    def test_return(self, name):
        refused(AVAILABLE, result=f' -> R.Tensor((2,), "float32", {name!r})')

    def test_match_cast(self, name):
        refused(AVAILABLE, value=f'R.match_cast(x, R.Tensor((2,), "float32", {name!r}))')

    def test_to_vdevice(self, name):
        refused(AVAILABLE, value=f"R.to_vdevice(x, {name!r})")

    def test_hint_on_device(self, name):
        refused(AVAILABLE, value=f"R.hint_on_device(x, {name!r})")


@pytest.mark.parametrize(
    "annotation",
    [
        'R.Tuple(R.Tensor((2,), "float32", "metal"))',
        'R.Callable((R.Tensor((2,), "float32", "metal"),), R.Tensor((2,), "float32"))',
        'R.Callable((R.Tensor((2,), "float32"),), R.Tensor((2,), "float32", "metal"))',
    ],
)
def test_nested_types(annotation):
    refused("no vdevice of kind 'metal'", value=f"R.match_cast(x, {annotation})")


def test_other_ways_in():
    refused(AVAILABLE, value="R.hint_on_device(x, R.device(2, 0))")
    refused(AVAILABLE, value="R.to_vdevice(x, R.device(2, 0))")
    refused(AVAILABLE, value='R.to_vdevice(x, I.lookup_vdevice("metal", 0))')
    refused(AVAILABLE, value='R.to_vdevice(x, I.lookup_vdevice("llvm"))')
    refused("needs a target kind", value="R.to_vdevice(x, I.lookup_vdevice())")
    refused(AVAILABLE, value='R.call_dps_packed("f", (x,), out_ty=R.Tensor((2,), "float32", "metal"))')


@pytest.mark.parametrize("source", [{"parameter": ', "llvm"'}, {"value": 'R.to_vdevice(x, "llvm")'}])
def test_module_without_vdevices(source):
    refused("declares no vdevices", vdevices="", **source)


def test_look_up_agrees_with_stock():
    @ir_module("llvm", "c:1", ("llvm", 0, "shared"))
    def Module(
        a: R.Tensor((2,), "float32", "llvm"),
        b: R.Tensor((2,), "float32", "llvm:1"),
        c: R.Tensor((2,), "float32", "vdevice:1"),
        d: R.Tensor((2,), "float32"),
    ):
        return (a, b, c, d)

    listed = vdevices_of(Module)
    vdevices = [param.ty.vdevice for param in Module["main"].params]
    assert vdevices.pop() is None
    assert all(same_object(vdevice, listed[index]) for vdevice, index in zip(vdevices, [0, 2, 1], strict=True))


def test_vdevice_objects_become_the_modules_own():
    copy = rh.VDevice("llvm", 0, "shared")
    mod = tvm.script.from_source(
        SOURCE.format(
            list=LIST, parameter=", other", result="", value="R.to_vdevice(R.to_vdevice(x, c), R.device(1, 0))"
        ),
        {"other": copy, "c": rh.VDevice("c", 1), "I": I, "R": R},
    )
    listed = vdevices_of(mod)
    inner, outer = (binding.value for binding in mod["main"].body.blocks[0].bindings)
    assert same_object(mod["main"].params[0].ty.vdevice, listed[2])
    assert same_object(inner.attrs.dst_vdevice, listed[1])
    assert same_object(outer.attrs.dst_vdevice, listed[0])


def test_printed_text_parses_back():
    mod = parse(
        value='R.hint_on_device(R.to_vdevice(x, "llvm:1"), "c")',
        parameter=', "llvm:0"',
        result=' -> R.Tensor((2,), "float32", "llvm:1")',
    )
    assert "llvm:1:shared" in mod.script()
    tvm.ir.assert_structural_equal(mod, tvm.script.from_source(mod.script()))


def test_outside_a_module():
    assert R.Tensor((2,), "float32").as_ty().vdevice is None
    own = rh.VDevice("llvm")
    assert same_object(R.Tensor((2,), "float32", own).as_ty().vdevice, own)
    with pytest.raises(VDeviceError, match="module under construction, and there is none"):
        R.Tensor((2,), "float32", "llvm").as_ty()
    with pytest.raises(VDeviceError, match="module under construction, and there is none"):
        I.lookup_vdevice("llvm", 0)


def test_again_changes_nothing():
    before = (R.to_vdevice, R.hint_on_device, I.lookup_vdevice, strict_tvmscript.TensorProxy.as_ty)
    strict_tvmscript.make_tvmscript_strict()
    assert before == (R.to_vdevice, R.hint_on_device, I.lookup_vdevice, strict_tvmscript.TensorProxy.as_ty)


STOCK = """
{imports}
@I.ir_module
class Module:
    I.module_global_infos({{"vdevice": [I.vdevice("llvm")]}})
    @R.function
    def main(x: R.Tensor((2,), "float32", "metal")):
        return x
assert Module["main"].params[0].ty.vdevice is None
"""
TVMSCRIPT = "from tvm.script import ir as I, relax as R"


def run(script: Path, text: str) -> subprocess.CompletedProcess[str]:
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(Path(rh.__file__).parents[1])}
    return subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)


def test_stock_loses_the_device(tmp_path):
    done = run(tmp_path / "stock.py", STOCK.format(imports=TVMSCRIPT))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        pytest.param(["import relax_hetero", TVMSCRIPT], marks=pytest.mark.slow),
        [TVMSCRIPT, "import relax_hetero"],
        pytest.param([TVMSCRIPT, "import relax_hetero.op"], marks=pytest.mark.slow),
        ["import relax_hetero.target.vdevice", TVMSCRIPT],
    ],
)
def test_importing_us_makes_it_an_error(tmp_path, imports):
    done = run(tmp_path / "strict.py", STOCK.format(imports="\n".join(imports)))
    assert done.returncode != 0
    assert "no vdevice of kind 'metal'" in done.stderr


def test_importing_us_does_not_import_tvm(tmp_path):
    done = run(tmp_path / "light.py", "import sys, relax_hetero; assert 'tvm' not in sys.modules")
    assert done.returncode == 0, done.stderr


MODEL = """
import sys
import relax_hetero as rh
from tvm.script import ir as I, relax as R

BEFORE

@I.ir_module
class Model:
    I.module_global_infos({"vdevice": [I.vdevice("llvm", 0)]})

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0")):
        with R.dataflow():
            y = R.to_vdevice(x, "cuda:2")
            R.output(y)
        return y
"""


AGAIN = "import tvm; rh.op.strict_tvmscript.make_tvmscript_strict()"


@pytest.mark.parametrize("before", ["", pytest.param(AGAIN, marks=pytest.mark.slow)])
def test_an_error_that_ends_a_program_is_printed_once(tmp_path, before):
    script = tmp_path / "model.py"
    script.write_text(MODEL.replace("BEFORE", before))
    settings = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TVM_BACKTRACE": "0"}
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run([sys.executable, script], env={**env, **settings}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    text = "error: no vdevice of kind 'cuda' (asked for 'cuda:2'); available: llvm:0"
    assert done.stderr.count(text) == 1
    assert f"{script}:15:17" in done.stderr and 'y = R.to_vdevice(x, "cuda:2")' in done.stderr
    assert "Traceback" not in done.stderr


def test_other_errors_go_to_the_hook_that_was_there(monkeypatch, capsys):
    errors = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: errors.append(error[0]))
    strict_tvmscript.show_errors()
    strict_tvmscript.show_errors()
    sys.excepthook(ValueError, ValueError("no"), None)
    assert errors == [ValueError] and capsys.readouterr().err == ""
