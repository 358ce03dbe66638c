"""Pages of reports in a headless Chromium: what a reader clicks, types and sees."""

import shutil
import time
from pathlib import Path

import pytest

from relax_hetero.report.page import fragment_of, page_of
from report.page.page_samples import chat_data, plan_data, report_data, timed_data

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        own = driver.chromium.executable_path
        program = next(filter(None, map(shutil.which, NAMES)), own if Path(own).exists() else None)
        if program is None:
            pytest.skip("needs Chromium: `playwright install chromium`, or one on PATH")
        browser = driver.chromium.launch(executable_path=program, headless=True, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_of(report_data(3), report_data(2)))
    return path.as_uri()


@pytest.fixture(scope="module")
def opened(browser, address):
    """A function that opens a page; nothing that it opened may have complained."""
    complaints = []

    def open_page(width=1280, height=900, where=address):
        page = browser.new_page(viewport={"width": width, "height": height})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: request.url.startswith("http") and complaints.append(request.url))
        page.goto(where)
        page.wait_for_selector("html[data-ready]", timeout=30_000)
        return page

    yield open_page
    assert complaints == []


@pytest.fixture(scope="module")
def page(opened):
    return opened()


def click_item(page, choice, times=1):
    """Click the first item of the graph for which the expression over `data` holds."""
    page.locator("#graph .canvas").scroll_into_view_if_needed()
    find = f"report.cy.nodes(':childless').filter((node) => {{ const data = node.data(); return {choice}; }})[0]"
    page.evaluate(f"void report.cy.center({find})")
    position = page.evaluate(f"{find}.renderedPosition()")
    box = page.locator("#graph .canvas").bounding_box()
    page.mouse.click(box["x"] + position["x"], box["y"] + position["y"], click_count=times)


def wait_until(page, condition):
    """Wait until an expression holds: Playwright's `wait_for_function` evaluates in the page, against its policy."""
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(20)


def items(page):
    return page.evaluate("report.cy.nodes(':childless').length")


def test_sections_are_those_that_have_data(page, opened, tmp_path):
    titles = page.locator("#sections a").all_inner_texts()
    for title in ("Overview", "Before and after", "Graph", "Timeline", "Memory", "Roofline", "Passes", "Tables"):
        assert title in titles
    path = tmp_path / "bare.html"
    bare = {key: value for key, value in report_data(1).items() if key not in ("profile", "timeline", "memory")}
    path.write_text(page_of(bare))
    other = opened(where=path.as_uri())
    assert "Timeline" not in other.locator("#sections a").all_inner_texts()
    assert "run with --profile" in other.locator("#missing").inner_text()
    other.close()


def test_search_finds_a_node_and_the_panel_tells_of_it(page):
    page.fill("#search", "softmax layer4")
    # The ops of one kernel, whose name has the first word.
    assert page.locator("#found [role=option]").count() == 3
    page.keyboard.press("Enter")
    panel = page.locator("#graph .panel")
    text = panel.inner_text()
    for part in ("500 µs", "/layer4/softmax", "fused_matmul_add_nn.softmax_4", "rule '*=llvm:0'", "row phase"):
        assert part in text
    assert "[object" not in text
    assert panel.locator("svg.tiles rect").count() > 1


def test_escape_closes_the_panel(page):
    panel = page.locator("#graph .panel")
    click_item(page, "data.kind === 'group'")
    assert panel.is_visible()
    page.keyboard.press("Escape")
    assert panel.is_hidden()


def test_a_kernel_opens_to_its_ops_and_closes(page):
    before = items(page)
    click_item(page, "data.kind === 'group'", times=2)
    wait_until(page, f"report.cy.nodes(':childless').length > {before}")
    page.locator("#graph .canvas").focus()
    page.click("text=Close the kernel")
    wait_until(page, f"report.cy.nodes(':childless').length === {before}")


def test_enter_opens_a_kernel_and_closes_it_from_its_frame(page):
    before = items(page)
    click_item(page, "data.kind === 'group'")
    page.keyboard.press("Enter")
    wait_until(page, f"report.cy.nodes(':childless').length > {before}")
    page.evaluate("void (report.cy.elements().unselect(), report.cy.nodes(':parent').select())")
    page.locator("#graph .canvas").focus()
    page.keyboard.press("Enter")
    wait_until(page, f"report.cy.nodes(':childless').length === {before}")


def test_arrow_keys_walk_along_values(page):
    click_item(page, "data.kind === 'input'")
    page.locator("#graph .canvas").focus()
    selections = []
    for key in ("ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
        selections.append(page.evaluate("report.cy.nodes(':selected').map((node) => node.id()).join()"))
    assert len(set(selections)) >= 2 and "" not in selections


def test_transfers_have_their_bytes(page):
    labels = page.evaluate("report.cy.edges('[?transfer]').map((edge) => edge.data('label'))")
    assert labels and set(labels) == {"96.0 KiB"}


@pytest.fixture(scope="module")
def large(opened, tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "report.html"
    path.write_text(page_of(report_data(120)))
    page = opened(where=path.as_uri())
    page.click("text=Open all")
    page.locator("#graph .canvas").scroll_into_view_if_needed()
    return page


def in_view(page):
    """How many nodes of the graph lie within the view."""
    return page.evaluate("""report.cy.nodes(":childless").filter((node) => {
        const [at, { x1, x2, y1, y2 }] = [node.position(), report.cy.extent()];
        return at.x >= x1 && at.x <= x2 && at.y >= y1 && at.y <= y2;
    }).length""")


def test_only_the_visible_part_of_a_large_graph_is_drawn(large):
    total = int(large.get_attribute("#graph .canvas", "data-items"))
    large.click("text=Start")
    near = in_view(large)
    assert total > 1500 and 5 < near <= items(large) < total / 4
    box = large.locator("#graph .canvas").bounding_box()
    for _ in range(4):
        large.mouse.move(box["x"] + 20, box["y"] + 500)
        large.mouse.down()
        large.mouse.move(box["x"] + 20, box["y"] + 20, steps=6)
        assert in_view(large) > near / 3
        large.mouse.up()
    assert items(large) < total / 4


def test_a_large_graph_is_bars_from_far_away_and_nodes_where_one_presses(large):
    large.click("text=Fit")
    kinds = "[...new Set(report.cy.nodes().map((node) => node.data('kind')))].join()"
    assert large.evaluate(kinds) == "bar"
    counts = large.evaluate("report.cy.nodes().map((node) => node.data('count'))")
    assert len(counts) <= 100
    assert sum(counts) == int(large.get_attribute("#graph .canvas", "data-items"))
    click_item(large, "data.kind === 'bar'")
    wait_until(large, "report.cy.nodes('[kind = \"bar\"]').empty()")
    assert in_view(large) > 5


def test_search_goes_to_a_node_of_a_large_graph(large):
    large.click("text=Fit")
    large.fill("#search", "softmax layer1003")
    large.keyboard.press("Enter")
    assert "/layer1003/" in large.locator("#graph .panel").inner_text()
    assert (
        large.evaluate("report.cy.nodes(':selected').map((node) => node.data('item').node.onnx[0]).join()")[:10]
        == "/layer1003"
    )
    assert in_view(large) > 5
    large.keyboard.press("Escape")


def test_tables_sort_and_search(page):
    page.locator("#tables").scroll_into_view_if_needed()
    first = page.locator("#table-transfers .tabulator-row").first
    first.wait_for()
    heading = page.locator("#table-transfers .tabulator-col", has_text="moved")
    heading.click()
    assert "lv10" in first.inner_text()
    heading.press("Enter")
    assert "lv2" in first.inner_text()
    page.locator("#tables input[type=search]").fill("9.54 mib")
    playwright.expect(page.locator("#tables [role=status]")).to_have_text("1 of 3 rows")


def test_the_button_makes_it_dark(page):
    colours = set()
    for _ in range(3):
        page.click("#theme")
        colours.add((page.inner_text("#theme"), page.evaluate("getComputedStyle(document.body).backgroundColor")))
    assert {name for name, _ in colours} == {"Auto", "Light", "Dark"}
    assert len({colour for _, colour in colours}) == 2


def test_charts_are_drawn_when_they_come_into_view(page):
    for section in ("timeline", "memory", "roofline", "profile"):
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{section}[data-drawn]", timeout=10_000)
    assert page.locator("#timeline canvas").count() and page.locator("#roofline canvas").count()


def drawn(page, *sections):
    for section in sections:
        page.locator(f"#{section}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#{section}[data-drawn]", timeout=10_000)
        page.wait_for_selector(f"#{section} canvas, #{section} .tabulator-row")


def test_a_benchmark_and_a_token_are_drawn(opened, tmp_path):
    path = tmp_path / "timed.html"
    path.write_text(page_of(timed_data()))
    page = opened(where=path.as_uri())
    drawn(page, "profile", "token", "bench")
    assert page.locator("#profile .tabulator").count() == 2
    assert "prefill_32" in page.locator("#profile").inner_text()
    assert "attention on cuda:0 2.00 ms" in page.locator("#token [role=img]").get_attribute("aria-label")
    text = page.locator("#bench").inner_text()
    for part in ("relax-hetero", "2.00 ms", "ValueError: <no op>"):
        assert part in text
    assert "relax-hetero 2.00 ms, ONNX Runtime 4.00 ms" in page.locator("#bench [role=img]").get_attribute("aria-label")
    page.close()


def test_a_plan_is_drawn(opened, tmp_path):
    path = tmp_path / "plan.html"
    path.write_text(page_of(plan_data()))
    page = opened(where=path.as_uri())
    drawn(page, "plan")
    assert page.locator("#plan .cards b").first.inner_text() == "273"
    words = [page.locator("#plan .chart").nth(index).get_attribute("aria-label") for index in range(3)]
    assert (
        "attention 0 on llvm:0, 4 on cuda:0; router, norms 0 on llvm:0, 4 on cuda:0; experts 2 on llvm:0, 3 on"
        in words[0]
    )
    assert "cuda:0 weights 2.00 GiB" in words[1] and "left 1.00 GiB" in words[1]
    assert words[2].endswith("cuda:0 2.00 GiB 100, 4.00 GiB 300.")
    assert page.locator("#plan canvas").count() == 3
    page.close()


def test_a_chat_is_drawn(opened, tmp_path):
    path = tmp_path / "chat.html"
    path.write_text(page_of(chat_data()))
    page = opened(where=path.as_uri())
    drawn(page, "chat", "chat-speed", "chat-tokens")
    assert page.locator("#table-chat .tabulator-row").count() == 3
    label = page.locator("#chat-tokens [role=img]").get_attribute("aria-label")
    assert label.startswith("Times of 4 pieces of 3 answers; the median is 25.0 ms")
    page.close()


def test_the_panel_and_the_roofline_name_the_peak_of_the_share(opened, tmp_path):
    data = report_data(1)
    for group in data["groups"]:
        group |= {"share_of_peak": 0.42, "bound": "memory"}
    path = tmp_path / "shares.html"
    path.write_text(page_of(data))
    page = opened(where=path.as_uri())
    page.fill("#search", "softmax")
    page.keyboard.press("Enter")
    text = page.locator("#graph .panel").inner_text()
    assert "of the memory rate" in text and "42.0 %" in text and "bound by memory" in text
    drawn(page, "roofline")
    page.close()


def test_boxes_have_the_name_of_the_models_file_first(page):
    labels = page.evaluate("report.cy.nodes(':childless').map((node) => node.data('label'))")
    assert any(label.startswith("/layer0/layer_norm\n") for label in labels)
    of_kernel = next(label for label in labels if "⊞2" in label)
    assert of_kernel.startswith("/layer") and of_kernel.splitlines()[1].startswith("matmul_add")


def test_where_the_time_goes_what_to_change_and_why_points_lie_above_their_roof(opened, tmp_path):
    # Marks that turn the text around them are written out.
    data = report_data(1) | {"title": "a\u202eb", "suggestions": ["\u2066c", "\\u202e", "\\\u200fd"]}
    for group in data["groups"]:
        group |= {"share_of_peak": 1.5, "bound": "memory"}
    path = tmp_path / "first.html"
    path.write_text(page_of(data))
    page = opened(where=path.as_uri())
    assert page.title() == page.locator("#title").inner_text() == "a\\u202eb"
    assert page.locator("#overview .pair .notes li").all_inner_texts() == ["\\u2066c", "\\u202e", "\\\\u200fd"]
    shares = page.locator("#overview .shares li").all_inner_texts()
    assert len(shares) == 6 and "18.0 %" in shares[0] and "others" in shares[-1]
    transfers = page.locator("#overview .cards abbr", has_text="transfers")
    assert "from one device to another" in transfers.get_attribute("title")
    hint = page.locator("#roofline .hint").inner_text()
    assert "lie above the roof of memory, at up to 1.5 times of it: tensors lie in a cache" in hint
    page.close()


def test_paper_has_every_section(opened):
    page = opened()
    page.locator("script[data-library]").first.wait_for(state="detached")  # what a browser prints is ready
    page.pdf(prefer_css_page_size=True)
    assert page.locator("main > section:not([data-drawn]) > .body:empty").count() == 0
    assert page.locator("#tables .printed tr").count() == 4
    assert page.locator("#profile .printed tbody tr").count() == len(report_data(3)["profile"]["rows"])
    page.close()


def test_a_phone_needs_no_scrolling_aside(opened):
    page = opened(width=375, height=740)
    for section in page.locator("main > section").all():
        section.scroll_into_view_if_needed()
        page.wait_for_timeout(20)
    wide, visible = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    assert wide <= visible
    page.close()


def test_a_fragment_is_drawn_within_another_page(opened, browser, tmp_path):
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><html data-ready><body>{fragment_of(report_data(1))}</body></html>")
    page = opened(where=path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for(timeout=15_000)
    assert frame.locator("#graph canvas").count() > 0
    page.close()
