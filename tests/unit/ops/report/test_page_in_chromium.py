"""The page in a real browser: charts that are drawn, a brush and tabs that work, by mouse and by keyboard."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from grpo.ops.report.page import write_report
from tests import chromium
from tests.support.report_pages import NASTY, with_texts

TABS = ("overview", "time", "completions", "failures", "setup")
DEADLINE_MS = 60_000


@dataclass(slots=True)
class Opened:
    """A page, and what it complained of or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open_tab(self, tab: str) -> None:
        self.page.click(f"#tab-{tab}")
        self.page.wait_for_selector(f"#{tab}[data-drawn]", state="attached", timeout=DEADLINE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if reason := chromium.why_not():
        if chromium.is_promised():
            pytest.fail(reason)
        pytest.skip(reason)
    with chromium.headless() as running:
        yield running


@pytest.fixture(scope="module")
def file(run_with: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first attempt failed, one node of which is slow, and of whose completions one is nasty."""
    folder = shutil.copytree(run_with("failed"), tmp_path_factory.mktemp("page") / "run")
    with_texts(folder, NASTY)
    out = folder / "report.html"
    write_report([folder], out)
    return out


@pytest.fixture
def opening(browser: Any) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def open_file(path: Path, *, width: int = 1280, scheme: str = "light", tab: str = "time") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        opened = Opened(page=context.new_page())
        opened.page.set_default_timeout(DEADLINE_MS)
        opened.page.on("console", lambda message: opened.complaints.append(message.text))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.goto(f"{path.as_uri()}#{tab}")
        opened.page.wait_for_selector(f"#{tab}[data-drawn]", state="attached")
        return opened

    yield open_file
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1280, "light"),
        (390, "dark"),
        pytest.param(1280, "dark", marks=pytest.mark.long),
        pytest.param(390, "light", marks=pytest.mark.long),
    ],
)
def test_tabs_by_width_and_scheme_draw_charts_and_fit(
    width: int, scheme: str, file: Path, opening: Callable[..., Opened]
) -> None:
    opened = opening(file, width=width, scheme=scheme)
    for tab in TABS:
        opened.open_tab(tab)
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width, tab
        assert opened.page.is_visible(f"#{tab}")
        for figure in opened.page.query_selector_all(f"#{tab} [data-chart]"):
            marks = figure.query_selector_all("svg .mark-line path, svg .mark-area path, svg .mark-rect path")
            assert [mark for mark in marks if mark.get_attribute("d")], figure.inner_text()
    ink = opened.page.evaluate("getComputedStyle(document.querySelector('#overview svg .role-axis-label text')).fill")
    assert ink == {"light": "rgb(90, 101, 112)", "dark": "rgb(154, 166, 178)"}[scheme]
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("file:", "data:"))] == []


def test_reward_curve_matches_metrics_file(file: Path, opening: Callable[..., Opened]) -> None:
    opened = opening(file, tab="overview")
    assert opened.page.evaluate("scrollY") == 0  # a link to a tab shows the verdict, too
    drawn = opened.page.evaluate(
        "grpoReport.views.get('progress-0-reward').data('rows').map((row) => [row.x0, row.y0])"
    )
    lines = [json.loads(line) for line in (file.parent / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in drawn] == [line["step"] for line in lines]
    assert [reward for _, reward in drawn] == pytest.approx([line["reward"] for line in lines], rel=1e-4)


def shown(opened: Opened) -> list[float]:
    """The part of the run that the lower timeline shows, in seconds since the run began."""
    return opened.page.evaluate(
        "grpoReport.views.get('detail').scale('x').domain().map((at) => at / 1000 - grpoReport.page.lanes.began)"
    )


def until_shown(opened: Opened, begin: float, end: float, within: float) -> None:
    opened.page.wait_for_function(
        """([begin, end, within]) => {
            const { page, views } = grpoReport;
            const shown = views.get('detail').scale('x').domain().map((at) => at / 1000 - page.lanes.began);
            return Math.abs(shown[0] - begin) <= within && Math.abs(shown[1] - end) <= within;
        }""",
        arg=[begin, end, within],
    )


def test_timeline_brush_and_buttons_set_shown_range(file: Path, opening: Callable[..., Opened]) -> None:
    opened = opening(file, tab="time")
    lanes = opened.page.evaluate("grpoReport.page.lanes")
    whole, last = lanes["ended_s"], lanes["first_shown_s"]
    until_shown(opened, last, whole, 1.0)
    drawn = "grpoReport.views.get('%s').data('rows').length"
    assert opened.page.evaluate(drawn % "whole-run") > 500
    assert opened.page.evaluate(drawn % "detail") > 500

    canvas = opened.page.query_selector("#whole-run canvas").bounding_box()
    left, width = opened.page.evaluate(
        "(() => { const view = grpoReport.views.get('whole-run'); return [view.origin()[0], view.width()]; })()"
    )
    at = [canvas["x"] + left + share * width for share in (0.25, 0.5)]
    middle = canvas["y"] + 20
    opened.page.mouse.move(at[0], middle)
    opened.page.mouse.down()
    opened.page.mouse.move(at[1], middle, steps=5)
    opened.page.mouse.up()
    until_shown(opened, 0.25 * whole, 0.5 * whole, 0.01 * whole)
    assert " to " in opened.page.inner_text("#range")

    opened.page.focus("[data-range=in]")
    opened.page.keyboard.press("Enter")
    until_shown(opened, 0.3125 * whole, 0.4375 * whole, 0.01 * whole)
    opened.page.click("[data-range=later]")
    until_shown(opened, 0.375 * whole, 0.5 * whole, 0.01 * whole)
    brush = opened.page.evaluate("grpoReport.views.get('whole-run').signal('brush_x')")
    assert brush == pytest.approx([0.375 * width, 0.5 * width], abs=0.01 * width)
    opened.page.click("[data-range=all]")
    until_shown(opened, 0, whole, 1.0)
    assert shown(opened)[1] == pytest.approx(whole, abs=1)
    assert opened.complaints == []


def test_tabs_and_charts_are_usable_by_keyboard(file: Path, opening: Callable[..., Opened]) -> None:
    opened = opening(file, tab="time")
    opened.page.focus("#tab-time")
    opened.page.keyboard.press("ArrowLeft")
    opened.page.wait_for_selector("#overview[data-drawn]")
    assert opened.page.evaluate("document.activeElement.id") == "tab-overview"
    assert not opened.page.is_visible("#time")
    assert opened.page.get_attribute("#tab-overview", "aria-selected") == "true"

    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.closest('[data-chart]').dataset.chart") == "progress-0-reward"
    opened.page.keyboard.press("ArrowLeft")
    last = json.loads((file.parent / "metrics.jsonl").read_text().splitlines()[-1])
    assert opened.page.text_content("#said").startswith(f"step 80: mean {last['reward']:.4g}, smoothed ")
    entropy = opened.page.query_selector("[data-chart$=entropy] output").text_content()
    assert entropy == f"{last['entropy']:.4g}"  # every chart of the tab shows that step
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_selector("[data-chart='progress-0-reward'] .numbers tbody tr:nth-child(12)")


def test_plots_and_controls_have_accessible_names(file: Path, opening: Callable[..., Opened]) -> None:
    opened = opening(file)
    for tab in TABS:
        opened.open_tab(tab)
    for plot in opened.page.query_selector_all("[role=img]"):
        assert len(plot.get_attribute("aria-label")) > 30
    label = opened.page.get_attribute("[data-chart='progress-0-reward'] .plot", "aria-label")
    assert "Reward, reward. mean: 0.2" in label
    for name in ("select", "input", "button", "summary"):
        for each in opened.page.query_selector_all(name):
            named = "node => node.labels?.length ? node.labels[0].textContent : node.textContent"
            assert each.evaluate(named).strip()
    unnamed = (
        "[...document.querySelectorAll('[data-chart]')].filter((each) => !each.querySelector('.title').textContent)"
    )
    assert opened.page.evaluate(f"{unnamed}.length") == 0


def test_completions_tab_sorts_by_reward_marks_changes_and_escapes_html(
    file: Path, opening: Callable[..., Opened]
) -> None:
    opened = opening(file, tab="completions")
    page = opened.page
    assert page.inner_text("#prompt-text") == "What is 0 + 17? Think, then <answer>."
    first = ".sample > div > span:first-child b"
    rewards = page.eval_on_selector_all(first, "all => all.map((each) => Number(each.textContent))")
    assert len(rewards) == 8
    assert rewards == sorted(rewards, reverse=True)
    before = page.inner_text("#samples-title")
    page.focus("#step")
    page.keyboard.press("Home")
    assert page.inner_text("#samples-title") != before

    page.check("[name=view][value=worst]")
    assert page.locator("#samples .sample").count() >= 6
    assert page.locator("#samples ins").count() > 0
    texts = page.eval_on_selector_all("#samples pre", "all => all.map((each) => each.textContent)")
    assert any("<b>Sample</b>" in text for text in texts)  # shown, not bold
    assert page.locator("#samples pre b").count() == 0

    nasty = page.evaluate("grpoReport.page.completions.prompts.findIndex((each) => each.text.includes('alert'))")
    page.select_option("#prompt", str(nasty))
    assert page.evaluate("document.getElementById('prompt-text').textContent") == NASTY
    assert opened.complaints == []


def test_completions_search_and_filters_match_page_data(file: Path, opening: Callable[..., Opened]) -> None:
    opened = opening(file, tab="completions")
    page = opened.page
    samples = (
        "grpoReport.page.completions.prompts.flatMap((p) => p.groups.flatMap((g) => g.samples.map((s) => [p, s])))"
    )
    total = page.evaluate(f"{samples}.length")
    assert page.inner_text("#found") == f"{total} of {total} samples"

    def counted(condition: str) -> int:
        """What the page says it has found, held against what its data say."""
        wanted = page.evaluate(f"{samples}.filter(([p, s]) => {condition}).length")
        assert 0 < wanted < total
        assert page.inner_text("#found") == f"{wanted} of {total} samples"
        return int(wanted)

    page.fill("#text", "ALERT")
    counted("p.text.includes('alert') || s[0].includes('alert')")
    page.fill("#text", "")
    page.fill("#least", "0.5")
    good = counted("s[1] >= 0.5")
    (reason, *_) = page.eval_on_selector_all("#reason option[value]:not([value=''])", "all => all.map((o) => o.value)")
    page.select_option("#reason", reason)
    assert counted(f"s[1] >= 0.5 && s[8] === '{reason}'") <= good
    rewards = page.eval_on_selector_all(".sample > div > span:first-child b", "all => all.map((e) => +e.textContent)")
    assert rewards
    assert min(rewards) >= 0.5

    page.fill("#text", "nothing says this")
    assert page.inner_text("#found") == f"0 of {total} samples"
    assert page.inner_text("#samples-title") == "No sample is like that"
    assert page.locator("#samples .sample").count() == 0
    page.fill("#text", "")
    assert page.locator("#samples .sample").count() > 0
    assert opened.complaints == []


def test_curves_of_several_runs_share_one_chart(
    run_with: Callable[[str], Path], tmp_path: Path, opening: Callable[..., Opened]
) -> None:
    out = tmp_path / "page.html"
    write_report([run_with(""), run_with("slow-node"), run_with("gap")], out)
    opened = opening(out, tab="curves")
    lines = opened.page.query_selector_all("[data-chart='runs-0-reward'] svg .mark-line path")
    assert len(lines) == 3
    assert len({line.get_attribute("stroke") for line in lines}) == 3
    assert "slow-node" in opened.page.inner_text("[data-chart='runs-0-reward'] .legend")
    opened.page.click("#tab-settings")
    assert opened.page.is_visible("#settings")
    assert opened.complaints == []


def test_page_of_one_step_run_draws_without_errors(tmp_path: Path, opening: Callable[..., Opened]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n{"step": 2, "rew')
    write_report([folder], tmp_path / "page.html")
    opened = opening(tmp_path / "page.html", tab="overview")
    assert (
        opened.page.locator("[data-chart='progress-0-reward'] svg .mark-symbol path").count() == 1
    )  # one point is seen, too
    for tab in TABS:
        opened.open_tab(tab)
    assert "missing or damaged" in opened.page.inner_text("header")
    assert opened.complaints == []


def test_charts_after_color_scheme_change_redraw(file: Path, opening: Callable[..., Opened]) -> None:
    opened = opening(file, tab="overview")
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_function(
        "getComputedStyle(document.querySelector('#overview svg .role-axis-label text')).fill === 'rgb(154, 166, 178)'"
    )
    assert opened.complaints == []
