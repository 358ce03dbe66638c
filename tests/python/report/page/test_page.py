"""Pages of reports without a browser: what they hold, that they load nothing, and that no name can leave its place."""

import base64
import gzip
import hashlib
import math
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import relax_hetero as rh
from relax_hetero.report import page as room
from relax_hetero.report.page import data_of, fragment_of, page_of
from report.page.page_samples import report_data

FOLDER = Path(room.__file__).parent
PROJECT = Path(__file__).resolve().parents[4] / "pyproject.toml"
SMALL = {"schema": 1, "kind": "module", "title": "toy"}
NASTY = "</script><script>alert(1)</script><!-- <script> {{script}} é 模 \u2028 ' \" & \\"


class Elements(HTMLParser):
    """The elements of a page, in order, and the text of its scripts by their id or library."""

    def __init__(self, page):
        super().__init__()
        self.found, self.texts, self._inside = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.found.append((tag, attributes))
        if tag == "script":
            self._inside = attributes.get("id") or attributes.get("data-library") or "own"
            self.texts[self._inside] = ""

    def handle_endtag(self, tag):
        self._inside = None

    def handle_data(self, data):
        if self._inside is not None:
            self.texts[self._inside] += data


def test_page_loads_nothing():
    elements = Elements(page_of(report_data(1)))
    for tag, attributes in elements.found:
        assert "src" not in attributes, tag
        assert attributes.get("href", "#").startswith(("#", "data:")), tag
    assert "default-src 'none'" in [a for t, a in elements.found if a.get("http-equiv")][0]["content"]
    style = (FOLDER / "style.css").read_text()
    assert "url(" not in style and "@import" not in style


def test_page_of_every_part_is_small():
    assert len(page_of(report_data(3), report_data(2))) < 2_500_000


def test_page_has_only_the_libraries_it_needs_each_with_its_licence():
    def libraries(data):
        return {a["data-library"] for _, a in Elements(page_of(data)).found if "data-library" in a}

    assert libraries(SMALL) == set()
    assert libraries(SMALL | {"tables": report_data(1)["tables"]}) == {"tabulator.min.js", "tabulator.min.css"}
    elements = Elements(page_of(report_data(1)))
    for name in libraries(report_data(1)):
        text = gzip.decompress(base64.b64decode(elements.texts[name])).decode()
        licence = (FOLDER / "vendor" / f"{name.split('.')[0]}.LICENSE").read_text()
        assert text.startswith("/*\n" + licence.replace("*/", "* /")[:500])


@pytest.mark.parametrize("padding", [0, 100_000], ids=["plain", "compressed"])
def test_no_text_leaves_its_place(padding):
    data = SMALL | {"title": NASTY, "notes": [NASTY, "x" * padding], "passes": [{"name": NASTY}]}
    page = page_of(data, data)
    assert data_of(page) == data
    scripts = [a for tag, a in Elements(page).found if tag == "script" and "data-library" not in a]
    assert [attributes.get("id") for attributes in scripts] == ["report-data", "report-previous", None]
    assert all(attributes.get("type") != "application/json" for attributes in scripts) == (padding > 0)


def test_data_comes_back():
    data = report_data(2)
    assert data_of(page_of(data)) == data


def test_numbers_that_are_not_finite_are_unknown():
    data = SMALL | {"notes": [math.nan, math.inf, {"deep": (-math.inf, 1.5)}]}
    assert data_of(page_of(data))["notes"] == [None, None, {"deep": [None, 1.5]}]


def test_the_same_data_makes_the_same_page():
    assert page_of(report_data(1)) == page_of(report_data(1))


@pytest.mark.parametrize("data", [{}, {"schema": 2}, [], None])
def test_data_of_another_schema_is_refused(data):
    with pytest.raises(rh.HeteroError, match="expected schema 1, found"):
        page_of(data)


def test_data_that_json_cannot_hold_is_refused():
    with pytest.raises(rh.HeteroError, match="not JSON.*set"):
        page_of(SMALL | {"notes": {1, 2}})


@pytest.mark.parametrize(
    "page", ["", "<html></html>", '<script type="application/gzip" id="report-data">AAAA</script>']
)
def test_text_that_is_not_a_page_is_refused(page):
    with pytest.raises(rh.HeteroError, match="not a page of a report|damaged"):
        data_of(page)


def test_fragment_holds_a_page_within_a_frame():
    fragment = fragment_of(report_data(1) | {"title": 'a "quote"'}, height=300)
    elements = Elements(fragment)
    assert [tag for tag, _ in elements.found] == ["iframe"]
    attributes = elements.found[0][1]
    assert attributes["sandbox"] == "allow-scripts" and attributes["height"] == "300"
    inside = data_of(attributes["srcdoc"])
    assert inside["nodes"] and "tables" not in inside and "memory" not in inside
    assert unescape(re.search('title="([^"]*)"', fragment)[1]) == 'Report: a "quote"'


def test_package_data_has_every_file():
    patterns = re.search(r'^"relax_hetero.report.page" = \[(.*)\]$', PROJECT.read_text(), re.MULTILINE)[1]
    listed = {path for pattern in re.findall('"([^"]+)"', patterns) for path in FOLDER.glob(pattern)}
    files = {path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert files == listed


def test_every_library_is_in_the_list_with_its_sum():
    table = (FOLDER / "vendor" / "README.md").read_text()
    listed = dict(re.findall(r"^\| `([^`]+)` \|.* \| `([0-9a-f]{64})` \|$", table, re.MULTILINE))
    libraries = [path for path in (FOLDER / "vendor").iterdir() if path.suffix in (".js", ".css")]
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in libraries}


def test_every_script_is_in_the_page():
    page = page_of(SMALL)
    for path in (FOLDER / "script").iterdir():
        assert path.read_text() in page, path.name
