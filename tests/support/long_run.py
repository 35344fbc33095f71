"""A run of many steps in seconds: a made-up one of 200 steps, again and again."""

import json
import re
from pathlib import Path

from tests.support.made_runs import BEGAN, MadeRun, make_run

PIECE = 200
TIMES = re.compile(r'"(begin|end|time)":([0-9.]+)')
STEP = re.compile(r'"step":(\d+)')


def make_long_run(folder: Path, steps: int, nodes: int) -> Path:
    """`steps` is a multiple of `PIECE`. Completions are those of the first piece."""
    make_run(folder, MadeRun(steps=PIECE, nodes=nodes, log_completions_every=10))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    length = lines[-1]["time"] - BEGAN + 5.0
    with (folder / "metrics.jsonl").open("w") as file:
        for piece in range(steps // PIECE):
            for line in lines:
                again = {**line, "step": line["step"] + piece * PIECE, "time": line["time"] + piece * length}
                file.write(json.dumps(again) + "\n")
    for path in (folder / "timeline").iterdir():
        _repeat(path, steps // PIECE, length)
    reported = json.loads((folder / "run.json").read_text())
    reported["attempts"][0]["arguments"]["max_steps"] = reported["attempts"][0]["step"] = steps
    (folder / "run.json").write_text(json.dumps(reported))
    return folder


def _repeat(path: Path, pieces: int, length: float) -> None:
    """Lines with their times and steps moved on; texts are cut once, for there are more than a million lines."""
    attempt, *lines = path.read_text().splitlines()
    cut = []
    for line in lines:
        template = STEP.sub('"step":%d', TIMES.sub(r'"\1":%.3f', line.replace("%", "%%")))
        step = STEP.search(line)
        cut.append((template, [float(value) for _, value in TIMES.findall(line)], int(step[1]) if step else None))
    with path.open("w") as file:
        file.write(attempt + "\n")
        for piece in range(pieces):
            moved = piece * length
            file.writelines(
                template % tuple(value + moved for value in values) + "\n"
                if step is None
                else template % (*(value + moved for value in values), step + piece * PIECE) + "\n"
                for template, values, step in cut
            )
