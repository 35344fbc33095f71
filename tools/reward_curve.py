"""The reward of a run over its steps, as a small SVG: README's picture of the demo.

    python -m tools.reward_curve runs/demo/metrics.jsonl docs/demo-reward.svg

Text stays text, in the reader's own sans-serif font. The same run makes the same bytes.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH_IN, HEIGHT_IN = 6.0, 2.6
LINE, TEXT, GRID = "#1f6feb", "#57606a", "#d0d7de"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "grpo",  # else its ids differ from run to run
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def read_rewards(metrics: Path) -> list[tuple[int, float]]:
    """Step and mean reward of each log of training.

    Raises:
        OSError, ValueError: the file cannot be read, or holds no reward.
    """
    logs = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [(log["step"], log["reward"]) for log in logs if "reward" in log]
    if not rewards:
        raise ValueError(f"{metrics} has no line with `reward`: name the metrics.jsonl of a run that has logged a step")
    return rewards


def draw(rewards: Sequence[tuple[int, float]], path: Path) -> None:
    """Writes the chart."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, values = zip(*rewards, strict=True)
    with matplotlib.rc_context(STYLE):
        figure, axis = pyplot.subplots(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        axis.plot(steps, values, color=LINE, linewidth=1.8)
        axis.set(xlabel="step", ylabel="reward", xlim=(0, max(steps)))
        axis.grid(color=GRID, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(GRID)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The reward of a run over its steps, as an SVG.")
    parser.add_argument("metrics", type=Path, help="metrics.jsonl of the run")
    parser.add_argument("picture", type=Path, help="the SVG to write")
    args = parser.parse_args(argv)
    try:
        rewards = read_rewards(args.metrics)
    except (OSError, ValueError) as error:
        print(f"reward_curve: {error}", file=sys.stderr)
        return 1
    draw(rewards, args.picture)
    (first, before), (last, after) = rewards[0], rewards[-1]
    print(f"{args.picture}: reward {before:.2f} at step {first}, {after:.2f} at {last}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
