"""`make docs`: the site builds without a warning, and its page of options says what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import trl

from grpo import GRPOConfig

pytest.importorskip("material", reason="the site needs mkdocs-material, which `make install` brings")

from tools import options_page, sizing_page
from tools.options_page import REFUSED, page, refusal

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def options() -> dict[str, list[str]]:
    """Cells of each row by the name in its first cell."""
    rows = [line.strip("| ").split(" | ") for line in page().splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in rows}


def test_options_page_lists_own_fields_with_defaults(options: dict[str, list[str]]) -> None:
    ours = GRPOConfig.__dataclass_fields__.keys() - trl.GRPOConfig.__dataclass_fields__.keys()
    assert ours <= options.keys()
    assert options["generation_lookahead"][0] == "`0`"
    assert options["vllm_start_timeout"][0] == "`1800`"
    assert options["vllm_sync_backend"][0] == "`'auto'`"
    assert options["vllm_max_logprob_gap"][0] == "`None`"
    assert all(len(cells[-1]) > 10 for name, cells in options.items() if name in ours)


def test_options_page_shows_changed_fields_of_trl(options: dict[str, list[str]]) -> None:
    assert options["use_vllm"][:2] == ["`True`", "`False`"]
    assert options["vllm_mode"][0] == "`'local'`"
    changed = {
        name
        for name, field in trl.GRPOConfig.__dataclass_fields__.items()
        if GRPOConfig.__dataclass_fields__[name].default != field.default
    }
    assert changed <= options.keys()


def test_options_page_lists_every_vllm_field_of_trl(options: dict[str, list[str]]) -> None:
    assert {name for name in trl.GRPOConfig.__dataclass_fields__ if name.startswith("vllm_")} <= options.keys()
    assert options["vllm_tensor_parallel_size"][0] == "`1`"


def test_options_page_of_refused_option_quotes_error(options: dict[str, list[str]]) -> None:
    for name in REFUSED:
        assert name in options[name][-1]
    with pytest.raises(ValueError, match="not refused any more"):
        refusal("vllm_mode", "local")


def test_options_page_matches_code() -> None:
    """If not: `python -m tools.options_page`."""
    assert options_page.PAGE.read_text() == page()


def test_mkdocs_strict_build_passes_and_loads_nothing_external(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    written = (tmp_path / "site" / "options.html").read_text()
    assert "generation_lookahead" in written
    assert (tmp_path / "site" / "architecture.html").exists()
    pages = [page.read_text() for page in (tmp_path / "site").glob("*.html")]
    loaded = re.compile(r'<(?:script|img|source)[^>]*\bsrc="?https?:|<link[^>]*rel="?stylesheet[^>]*href="?https?:')
    assert [found[0] for page in pages for found in loaded.finditer(page)] == [], "a page loads from a network"


def test_sizing_page_matches_plan() -> None:
    """If not: `python -m tools.sizing_page`, which takes minutes; here the first row."""
    page = sizing_page.PAGE.read_text()
    assert page.startswith(sizing_page.HEAD)
    assert f"| {' | '.join(sizing_page.smallest('Qwen2.5-1.5B', 2048).cells())} |" in page
    rows = [line for line in page.splitlines() if line.startswith("| Qwen")]
    assert len(rows) == len(sizing_page.TENSOR_PARALLEL) * len(sizing_page.COMPLETION_TOKENS)
