"""Display of an evaluation: one line and a table, or JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from grpo.ops.evaluate.evaluating import SetResult
from grpo.ops.evaluate.job import EvaluationJob


def print_table(job: EvaluationJob, results: Sequence[SetResult]) -> None:
    """Print a line with the first figure of each set, usually pass@1, and a table with a column for each."""
    said = ", ".join(
        f"{each.title} {name} {value:.3f}" for each in results for name, value in [*each.metrics.items()][:1]
    )
    print(f"{job.checkpoint.name}: {said}")
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("")
    for each in results:
        table.add_column(each.title, justify="right")
    for name in dict.fromkeys(name for each in results for name in each.metrics):
        table.add_row(name, *(f"{each.metrics[name]:.4f}" for each in results))
    table.add_row("prompts", *(f"{each.num_prompts:,}" for each in results))
    table.add_row("completions", *(f"{each.num_completions:,}" for each in results))
    table.add_row("refused", *(f"{each.num_refused:,}" for each in results))
    table.add_row("mean length (tokens)", *(f"{each.mean_length:.1f}" for each in results))
    table.add_row("clipped", *(f"{each.clipped_ratio:.1%}" for each in results))
    table.add_row("seconds", *(f"{each.seconds:.1f}" for each in results))
    Console().print(table)


def print_json(job: EvaluationJob, results: Sequence[SetResult]) -> None:
    """Print JSON, with metrics under the run's names."""
    sets = []
    for each in results:
        prefix = f"eval_{each.name}_" if each.name else "eval_"
        sets.append({**asdict(each), "metrics": {f"{prefix}{name}": value for name, value in each.metrics.items()}})
    print(json.dumps({"checkpoint": str(job.checkpoint), "step": job.step, "sets": sets}, indent=2))
