"""The names of `rh.llm`, which are resolved on first use."""

import pkgutil
import subprocess
import sys

from relax_hetero import llm


def test_importing_the_room_imports_no_tvm():
    """The help of commands that use it needs none."""
    code = "import sys, relax_hetero.llm; sys.exit('tvm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_no_module_has_the_name_of_a_function():
    """Its import would take the place of the function."""
    modules = {module.name for module in pkgutil.iter_modules(llm.__path__)}
    assert len(modules) > 10
    assert modules & set(llm.__all__) == set()
