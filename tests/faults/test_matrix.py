"""The matrix is whole, its page says what is known; and some of its cells, on real jobs."""

from pathlib import Path

import pytest

from tests.faults import page
from tests.faults.matrix import FAULTS, IN_LONG_TESTS, IN_TESTS, LAYOUTS, PHASES, cells, find
from tests.faults.run import Ground, run_cell


def test_no_cell_is_empty_without_a_reason() -> None:
    everything = list(cells())
    assert len(everything) == len(FAULTS) * len(PHASES) * len(LAYOUTS) == len({cell.name for cell in everything})
    for cell in everything:
        assert (cell.expected is None) == bool(cell.why_not), cell.name
    for fault in FAULTS:
        assert any(cell.expected for cell in everything if cell.fault is fault), f"{fault.name} is never put"
    chosen = {*IN_TESTS, *IN_LONG_TESTS}
    assert {cell.name for cell in find(list(chosen))} == chosen


def test_the_page_says_what_is_known() -> None:
    assert page.PAGE.read_text() == page.page(page.read_results()), "python -m tests.faults.page writes it"


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Ground:
    return Ground.make(tmp_path_factory.mktemp("ground"))


@pytest.mark.parametrize("name", [*IN_TESTS, *(pytest.param(each, marks=pytest.mark.long) for each in IN_LONG_TESTS)])
def test_a_fault_ends_as_promised(name: str, ground: Ground, tmp_path: Path) -> None:
    (cell,) = find([name])
    result = run_cell(cell, ground, tmp_path / "out")
    assert result.wrong == [], result
