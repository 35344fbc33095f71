"""The example with images, as users start it: it learns from pictures, and from grey ones nothing."""

from pathlib import Path

import pytest

from tests.support.finished import finish
from tests.support.launching import ROOT, accelerate_command, free_port, start
from tests.support.multimodal_models import engines_environment

MOSTLY_GUESSED, CHANCE_AT_MOST, LEARNT = 0.4, 0.35, 0.7


def run_example(out: Path, *flags: str) -> tuple[float, float]:
    """Mean reward of the first ten of 60 steps, and of the last ten, which the example prints, too."""
    script = [str(ROOT / "examples" / "quadrants.py"), "--output_dir", str(out), *flags]
    job = start(accelerate_command(script, port=free_port()), out, env=engines_environment())
    rewards = [line["reward"] for line in finish(job)]
    assert len(rewards) == 60
    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    said = f"mean reward of the first ten steps {first:.3f}, of the last ten {last:.3f}\n"
    assert job.output().count(said) == 1, job.fail(f"not said once: {said}")
    return first, last


@pytest.mark.long
def test_quadrants_example_learns_lit_colour(tmp_path: Path) -> None:
    first, last = run_example(tmp_path)
    assert first <= MOSTLY_GUESSED
    assert last > LEARNT


@pytest.mark.long
def test_quadrants_example_with_grey_images_learns_nothing(tmp_path: Path) -> None:
    first, last = run_example(tmp_path, "--grey")
    assert first <= CHANCE_AT_MOST
    assert last <= CHANCE_AT_MOST
