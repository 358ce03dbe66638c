"""`rh.show`: a Relax module as a picture, at any stage."""

from __future__ import annotations

import os
from typing import Any

import tvm

from ..artifact.file_hints import describe_value
from ..display.html import Column, Markup, device_html, escaped, folded, paragraph, table, view
from ..display.text import bytes_text, text_table
from ..errors import HeteroError
from .graph_picture import function_picture, short_op, value_text
from .module_graph import module_data
from .page import page_of
from .written_report import report_path, write_page

_FIRST_FUNCTIONS = 3


class ShownModule:
    """A module to look at; `rh.show` makes one. A notebook shows the picture, printing it gives a table.

    Attributes
    ----------
    data : dict
        Nodes, edges, devices and kernels as JSON data.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"<ShownModule of {self.data['title']}>"

    def __str__(self) -> str:
        kernels = {node: group["kernel"] for group in self.data["groups"] for node in group["nodes"]}
        makers: dict[int, list[str]] = {}
        names = {node["id"]: node["name"] for node in self.data["nodes"]}
        for edge in self.data["edges"]:
            makers.setdefault(edge["to"], []).append(names[edge["from"]])
        rows = [
            (
                *(node["function"], node["name"], short_op(node) if node["op"] else node["kind"], node["device"]),
                *(", ".join(map(value_text, node["values"])), ", ".join(makers.get(node["id"], ()))),
                kernels.get(node["id"], ""),
            )
            for node in self.data["nodes"]
            if node["kind"] != "constant"
        ]
        head = ("function", "value", "op", "device", "type", "reads", "kernel")
        return "\n".join([text_table(head, rows, left=len(head)), *self.data["notes"]])

    def _repr_html_(self) -> str:
        return view(*self._parts())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page of a report: a picture to zoom, to open and to search. It needs no network.

        Raises
        ------
        HeteroError
            The file cannot be written.
        """
        write_page(page_of(self.data), report_path(path))

    def _parts(self) -> list[str]:
        names = [each["name"] for each in self.data["devices"]]
        legend = Markup(" &nbsp; ".join(device_html(name, names) for name in names))
        parts: list[str] = [paragraph(legend, Markup(" &nbsp; "), *self.data["notes"])]
        for number, function in enumerate(each["name"] for each in self.data["functions"]):
            shown = self._function(function, names)
            more = len(self.data["functions"]) > 1
            parts.append(folded(function, shown, is_open=number < _FIRST_FUNCTIONS) if more else shown)
        return parts

    def _function(self, function: str, names: list[str]) -> Markup:
        picture = function_picture(self.data, function)
        listed = self._list(function, names)
        if picture is None:
            return Markup(paragraph("The function is too large for a picture.") + folded("Its values", listed))
        return Markup(picture + folded("The same as a table", listed))

    def _list(self, function: str, names: list[str]) -> Markup:
        """Every node as a row: for those who do not see the picture, and for functions too large for one."""
        kernels = {node: group["kernel"] for group in self.data["groups"] for node in group["nodes"]}
        columns = [
            *(Column("value"), Column("op"), Column("device"), Column("type"), Column("bytes", True)),
            *(Column("kernel"), Column("why it is there")),
        ]
        rows = [
            (
                *(node["name"], short_op(node) if node["op"] else node["kind"], device_html(node["device"], names)),
                *(", ".join(map(value_text, node["values"])), _bytes(node)),
                *(escaped(kernels.get(node["id"], "")), node["reason"] or ""),
            )
            for node in self.data["nodes"]
            if node["function"] == function
        ]
        return table(f"Values of {function}", columns, rows)


def _bytes(node: dict[str, Any]) -> str:
    found = [value["bytes"] for value in node["values"]]
    return bytes_text(None if None in found else sum(found)) if found else ""


def show(mod: tvm.IRModule, title: str = "") -> ShownModule:
    """A module as a picture: its values and ops on their devices, at any stage of compilation.

    It may be fresh from a front end, placed, encoded, cut into kernels or lowered; stock modules of TVM are shown, too.

    Parameters
    ----------
    mod : tvm.IRModule
        Module of Relax functions.
    title : str, optional
        Title of a page that is saved; default: the names of the functions.

    Returns
    -------
    ShownModule
        A notebook shows it as a picture, ``print`` as a table, and ``save("model.html")`` writes a page.

    Raises
    ------
    HeteroError
        The argument is not a module, or a module without a Relax function.

    Examples
    --------
    >>> placed = rh.place(mod, ["llvm", "cuda:0"], {"*": "cuda:0"})
    >>> rh.show(placed)
    >>> rh.show(rh.transform.FormRows()(placed)).save("rows.html")
    """
    if not isinstance(mod, tvm.IRModule):
        hint = "; an executable shows itself, and explain() prints its tables" if hasattr(mod, "explain") else ""
        raise HeteroError(f"rh.show: {describe_value(mod)}; expected a tvm.IRModule{hint}")
    data = module_data(mod, title)
    if not data["functions"]:
        raise HeteroError(f"show: found no Relax function in a module of {len(mod.functions)} functions")
    return ShownModule(data)
