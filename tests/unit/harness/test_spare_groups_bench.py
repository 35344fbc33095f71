"""`bench.spare_groups`: the runs that it starts, and what it makes of their curves."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import spare_groups
from grpo.ops.train.arguments import parse_arguments
from grpo.ops.train.data import load_data, load_evaluation


def test_spare_groups_benchmark_starts_both_sides_with_valid_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs themselves are those of `train.py`, which has tests of its own."""
    asked = []

    def run(command: list[str], **kwargs: object) -> subprocess.CompletedProcess:
        arguments = parse_arguments(command[command.index(str(spare_groups.ROOT / "train.py")) + 1 :])
        training = arguments.training
        data = load_data(arguments)
        answers = data["train"]["answer"]
        assert answers[1] == answers[3] == spare_groups.NO_ANSWER != answers[0]
        assert len(load_evaluation(arguments, data)["test"]) == 512
        asked.append((training.seed, training.spare_groups, training.generation_batch_size // training.num_generations))
        gain = 0.1 if training.spare_groups else 0.05
        lines = [{"step": step, "frac_reward_zero_std": 0.5, "num_tokens": 100 * step} for step in (1, 2, 3)]
        lines += [{"step": step, "eval_test_avg@1": 0.4 + gain * step} for step in (1, 2, 3)]
        metrics = Path(training.output_dir or "") / "metrics.jsonl"
        metrics.parent.mkdir()
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(spare_groups, "subprocess", SimpleNamespace(run=run))
    output = tmp_path / "spares.json"
    monkeypatch.setattr(sys, "argv", ["bench.spare_groups", "--device", "cpu", "--short", "--output", str(output)])
    spare_groups.main()
    assert asked == [(42, 0, 32), (42, 32, 32)]
    ratios = [ratio["values"] for ratio in json.loads(output.read_text())["ratios"]]
    assert ratios == [[1.0], [1.0], [1.0]]  # three evaluations are one point of each curve


def test_report_of_spare_groups_uses_first_point_at_other_end() -> None:
    def curve(rewards: list[float], tokens_of_a_step: float) -> spare_groups.Curve:
        steps = [10 * (number + 1) for number in range(len(rewards))]
        tokens = [tokens_of_a_step * step for step in steps]
        return spare_groups.Curve(steps=steps, rewards=rewards, tokens=tokens, flat=0.5)

    plain = [curve([0.4, 0.5, 0.6, 0.6], 100), curve([0.4, 0.4, 0.5, 0.55], 100)]
    spared = [curve([0.5, 0.61, 0.6, 0.6], 150), curve([0.4, 0.5, 0.5, 0.5], 150)]
    report = spare_groups.report_of(plain, spared, {"steps": 40, "groups": 32, "spare_groups": 32, "seeds": 2})
    steps, own_steps, tokens = (ratio.values for ratio in report.ratios)
    assert steps == (40 / 20, 1.0)
    assert own_steps == (30 / 20, 1.0)
    assert tokens == (4000 / 3000, 4000 / 6000)
    assert "1 of 2 runs with spare groups never had that reward" in report.notes
