"""Docstrings: everything public has a text on the pages of the API, and texts begin with a noun or a verb."""

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from functools import cached_property
from pathlib import Path

import pytest

import relax_hetero as rh

ROOT = Path(__file__).resolve().parents[2]
PLACE = re.compile(r"^::: (\S+)\.(\w+)$", re.MULTILINE)
SECTION = re.compile(r"^([A-Z]\w+)\n-+\n(.*?)(?=\n\n[A-Z]\w+\n---|\Z)", re.MULTILINE | re.DOTALL)
OTHER_BEGINNING = re.compile(
    r'^ *r?"""(?:Of|By|That|What|Whether)\b|^( +)\*{0,2}\w[\w*, .]*(?: : .*)?\n\1    (?:Of|By|That|What)\b',
    re.MULTILINE,
)
"""A docstring, or the text of an entry, that begins with a preposition, a pronoun or a conjunction."""
ENTRY = re.compile(r"^(\S.*?)(?: : .*)?\n((?:(?: .*)?\n)*)", re.MULTILINE)


def entries(docstring, *sections):
    """The names in some of numpydoc's sections, with their texts."""
    texts = {title: body + "\n" for title, body in SECTION.findall(inspect.cleandoc(docstring or ""))}
    pairs = [pair for title in sections for pair in ENTRY.findall(texts.get(title, ""))]
    return {name.lstrip("*"): text.strip() for names, text in pairs for name in names.split(", ")}


def missing_in_function(function, docstring, sections=("Parameters",)):
    """Parameters, and results and errors that are named, without a text."""
    texts = entries(docstring, *sections)
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    lacking = [name for name, text in entries(docstring, "Raises", "Returns").items() if not text]
    return [name for name in names if not name.startswith("_") and not texts.get(name)] + lacking


def stored_attributes(cls):
    """Public attributes that a constructor assigns."""
    if "__init__" not in vars(cls) or dataclasses.is_dataclass(cls):
        return set()
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(cls.__init__))))
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in stored if ast.unparse(node.value) == "self" and not node.attr.startswith("_")}


def missing_in_class(cls):
    """Parameters, attributes and methods without a text, and what methods lack."""
    texts = entries(cls.__doc__, "Attributes", "Parameters")
    names = {name for name in inspect.get_annotations(cls) if not name.startswith("_")} | stored_attributes(cls)
    missing = [name for name in names if not texts.get(name) and not isinstance(getattr(cls, name, None), property)]
    has_constructor = cls.__init__ is not object.__init__ and not issubclass(cls, Exception)
    if has_constructor and not getattr(cls, "_is_protocol", False):
        missing += missing_in_function(cls, cls.__doc__, ("Parameters", "Attributes"))
    for name, member in vars(cls).items():
        function = getattr(member, "__func__", member)
        if name.startswith("_"):
            continue
        if isinstance(member, property | cached_property):
            missing += [name] if not member.__doc__ and not texts.get(name) else []
        elif inspect.isfunction(function):
            lacks = missing_in_function(function, function.__doc__)
            missing += [f"{name}({each})" for each in lacks] + ([] if function.__doc__ else [name])
    return missing


def test_everything_public_has_a_text():
    missing = {}
    for page in sorted((ROOT / "docs" / "api").glob("*.md")):
        for module, name in PLACE.findall(page.read_text()):
            value = getattr(importlib.import_module(module), name)
            lacks = missing_in_class(value) if inspect.isclass(value) else missing_in_function(value, value.__doc__)
            missing[f"{module}.{name}"] = lacks + ([] if value.__doc__ else [name])
    for name in rh.transform.passes():
        constructor = getattr(rh.transform, name)
        lacks = missing_in_function(constructor, constructor.__doc__)
        missing[name] = [each for each in lacks if each != "tvm.transform.Pass"]
    assert len(missing) > 150
    assert {place: names for place, names in missing.items() if names} == {}


def test_missing_texts_are_found():
    class Sample:
        """A sample.

        Parameters
        ----------
        size : int
            Bytes.
        offset : int
        """

        def __init__(self, size: int, offset: int) -> None:
            self.size, self.end = size, size + offset

        def read(self, count: int) -> None:
            """Read.

            Raises
            ------
            OSError
            """

    assert sorted(missing_in_class(Sample)) == ["end", "offset", "read(OSError)", "read(count)"]


@pytest.mark.parametrize(
    "text",
    [
        '"""What it is."""',
        '    """Whether it is."""',
        "    size : int\n        Of the tile.\n",
        "    OSError\n        That.",
    ],
)
def test_texts_that_begin_with_other_words_are_found(text):
    assert OTHER_BEGINNING.search(text)


def test_texts_begin_with_a_noun_or_a_verb():
    matches = []
    for path in (ROOT / "python").rglob("*.py"):
        text = path.read_text()
        matches += [f"{path}:{text.count(chr(10), 0, match.end()) + 1}" for match in OTHER_BEGINNING.finditer(text)]
    assert matches == []
