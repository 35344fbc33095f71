"""`bench.learning`: the runs that it starts, and what it makes of what they have learned."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import learning
from grpo.ops.train.arguments import parse_arguments


@pytest.mark.parametrize("at_once", [1, 2])
def test_learning_benchmark_starts_demo_with_valid_flags(
    at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs themselves are the demo, which has tests of its own."""
    asked = []

    def run(command: list[str], env: dict[str, str], **kwargs: object) -> subprocess.CompletedProcess:
        assert env.get("OMP_NUM_THREADS", "none") == ("none" if at_once == 1 else "1")
        training = parse_arguments(command[command.index(str(learning.ROOT / "train.py")) + 1 :]).training
        way = (training.generation_lookahead, training.old_logprobs)
        asked.append((training.seed, training.learning_rate > 0, *way, training.max_steps))
        age = min(training.generation_lookahead, 3)  # one way is void
        reward = 0.4 if not training.learning_rate else 0.6 - 0.01 * age
        lines = [{"step": step, "reward": reward, "rollout/staleness_mean": age} for step in range(1, 4)]
        metrics = Path(training.output_dir) / "metrics.jsonl"
        metrics.parent.mkdir()
        metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"train_runtime": 13.0}]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(learning, "subprocess", SimpleNamespace(run=run))
    output = tmp_path / "learning.json"
    monkeypatch.setattr(
        sys,
        "argv",
        ["bench.learning", "--device", "cpu", "--short", "--output", str(output), "--at_once", str(at_once)],
    )
    learning.main()
    wanted = [(42, False, *learning.BASE, 3), *((42, True, *way, 3) for way in learning.WAYS)]
    assert sorted(asked) == sorted(wanted)
    assert at_once > 1 or asked == wanted
    result = json.loads(output.read_text())
    assert [ratio["values"] for ratio in result["ratios"]] == [
        [pytest.approx(gain)] for gain in (1.0, 0.95, 0.95, 0.85, 0.85)
    ]
    assert [ratio["goal"] for ratio in result["ratios"]] == [0.9, 0.9, 0.9, None, None]
    assert [ratio["name"].endswith(": void") for ratio in result["ratios"]] == [False] * 3 + [True] * 2


def test_report_of_learning_notes_standard_error() -> None:
    runs = {way: [learning.Learned(0.5 + 0.1 * seed, way.lookahead) for seed in range(2)] for way in learning.WAYS}
    notes = learning.report_of(0.3, runs, {"steps": 200}).notes
    assert (
        "lookahead 4, old_logprobs engine: gain 0.250 +- 0.050 (mean and standard error over seeds); "
        "less that of lookahead 0, old_logprobs trainer, seed by seed: 0.000 +- 0.000"
    ) in notes
