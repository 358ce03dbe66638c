"""Declaration of passes: a plain function does the work, and one line makes it a pass.

A pass has a module of its own. The module's docstring says what the pass does, what it assumes, and shows a program
before and after; its function takes a module, and options, and returns a module::

    def form_rows(mod: tvm.IRModule) -> tvm.IRModule: ...

    FormRows = declare_pass("FormRows", form_rows)

``FormRows()`` is then a ``tvm.transform.Pass``, like TVM's own passes, and ``help(FormRows)`` shows the module's
docstring. The function can be called and tested without TVM's pass machinery.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec

import tvm

from ...errors import BuildError, HeteroError
from .reasons import location_of, reason
from .remarks import recording

_Options = ParamSpec("_Options")
_HEADING = re.compile(r"^(\w+)\n-{3,}$", re.MULTILINE)
_RETURNS = "Returns\n-------\ntvm.transform.Pass"


@dataclass(frozen=True)
class PassDeclaration:
    """Declaration of a pass.

    Attributes
    ----------
    name : str
        E.g. "FormRows".
    summary : str
        One sentence: the first line of the text.
    text : str
        Description: what the pass does, what it assumes, a program before and after; then its options.
    options : mapping of str to object
        Each option's default; ``inspect.Parameter.empty`` for an option without one.
    constructor : callable
        Takes the options, returns the ``tvm.transform.Pass``.
    """

    name: str
    summary: str
    text: str
    options: dict[str, Any]
    constructor: Callable[..., tvm.transform.Pass]


_DECLARED: dict[str, PassDeclaration] = {}


def declare_pass(
    # The constructor's name. The text of `work`'s module begins with it and a colon.
    name: str,
    # Takes a module and the options, returns a module: the same object where nothing changes. The sections "Parameters"
    # and "Raises" of its docstring become those of the constructor.
    work: Callable[Concatenate[tvm.IRModule, _Options], tvm.IRModule],
    # Takes the options when the constructor is called, and raises if they are invalid.
    check: Callable[_Options, None] | None = None,
) -> Callable[_Options, tvm.transform.Pass]:
    """Declare a pass, and return its constructor (`relax_hetero.transform.passes` lists it from now on).

    Returns the constructor with the options of `work` as its signature.
    """
    _, *options = inspect.signature(work).parameters.values()
    signature = inspect.Signature(options, return_annotation="tvm.transform.Pass")

    def constructor(*args: _Options.args, **kwargs: _Options.kwargs) -> tvm.transform.Pass:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:  # here, not where the pass runs
            raise TypeError(f"{name}: {error}") from None
        if check is not None:
            check(*args, **kwargs)

        def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
            try:
                return recording(lambda mod: work(mod, *args, **kwargs), mod)
            except HeteroError:
                raise
            except Exception as error:  # errors of TVM's passes have no common class
                raise BuildError(
                    f"this module cannot be lowered by {name}: {location_of(error)}{reason(error)}"
                ) from error

        return tvm.transform.module_pass(run, opt_level=0, name=name)

    text = _text(inspect.cleandoc(sys.modules[work.__module__].__doc__ or ""), inspect.getdoc(work) or "")
    summary = text.partition("\n\n")[0].removeprefix(f"{name}:").strip()
    constructor.__name__ = constructor.__qualname__ = name
    constructor.__module__, constructor.__doc__ = work.__module__, text
    constructor.__signature__ = signature  # type: ignore[attr-defined]
    defaults = {option.name: option.default for option in options}
    _DECLARED[name] = PassDeclaration(name, summary, text, defaults, constructor)
    return constructor


def declared_passes() -> dict[str, PassDeclaration]:
    """The passes whose modules have been imported, by name."""
    return dict(_DECLARED)


def _text(module_doc: str, function_doc: str) -> str:
    """A module's docstring, then those sections of its function's docstring that users of the pass need."""
    sections = _HEADING.split(function_doc)
    bodies = dict(zip(sections[1::2], sections[2::2], strict=True))
    parts = [module_doc]
    options = re.sub(r"^\nmod : .*\n(?:    .*\n?|\n(?=    ))*", "\n", bodies.get("Parameters", ""))
    if options.strip():
        parts.append(f"Parameters\n----------\n{options.strip()}")
    parts.append(_RETURNS)
    if "Raises" in bodies:
        parts.append(f"Raises\n------\n{bodies['Raises'].strip()}")
    return "\n\n".join(parts)
