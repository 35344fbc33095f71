"""`python -m tools.reward_curve`: which lines of metrics.jsonl it draws, and what it writes."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tools.reward_curve import draw, main, read_rewards

LOGS = [
    {"step": 5, "reward": 0.25, "loss": 1.0},
    {"step": 5, "eval_reward": 0.3},
    {"step": 10, "reward": 0.5},
    {"step": 10, "train_runtime": 3.0},
]


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(log) + "\n" for log in LOGS))
    return path


def test_read_rewards_keeps_training_lines(metrics: Path) -> None:
    assert read_rewards(metrics) == [(5, 0.25), (10, 0.5)]


def test_draw_writes_small_reproducible_svg_with_text(metrics: Path, tmp_path: Path) -> None:
    pictures = [tmp_path / name for name in ("a.svg", "b.svg")]
    for picture in pictures:
        draw(read_rewards(metrics), picture)
    first, second = (picture.read_text() for picture in pictures)
    assert first == second
    assert len(first) < 20_000
    words = {"".join(element.itertext()) for element in ElementTree.fromstring(first).iter() if "text" in element.tag}
    assert {"step", "reward"} <= words
    assert "<dc:date>" not in first


def test_reward_curve_command_prints_rewards_or_error(
    metrics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(metrics), str(tmp_path / "new" / "curve.svg")]) == 0
    assert "reward 0.25 at step 5, 0.50 at 10" in capsys.readouterr().out
    metrics.write_text('{"step": 5, "loss": 1.0}\n')
    assert main([str(metrics), str(tmp_path / "none.svg")]) == 1
    assert "has no line with `reward`" in capsys.readouterr().err
    assert main([str(tmp_path / "not-there.jsonl"), str(tmp_path / "none.svg")]) == 1
    assert "not-there.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "none.svg").exists()
