"""Input of an evaluation: a checkpoint, the settings of its run, and the evaluation sets in the run's order."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo.config.options import check_evaluating
from grpo.ops.train.arguments import Arguments, parse_arguments
from grpo.ops.train.checks import rewards_of
from grpo.ops.train.data import load_data, load_evaluation
from grpo.ops.train.demo import demo_dataset
from grpo.ops.train.elsewhere import ConfigElsewhere
from grpo.ops.train.parser import UnknownArgumentsError
from grpo.place.spelling import did_you_mean
from grpo.record.files import DAMAGED, HISTORY_FILE, read_attempts

_OF_ATTEMPT = re.compile(r"checkpoint-(\d+)")
_SCRIPT = "train.py"  # the recipe, in the package or beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationJob:
    """A saved model, and the sets to evaluate."""

    checkpoint: Path
    step: int
    """Optimizer steps of the model; determines seeds, as in the run."""
    ranks: int
    """Number of ranks of the run; determines its batches."""
    arguments: Arguments
    sets: dict[str | None, Any]
    """Rows by the set's name, in the run's order; a single set without a name has None."""
    asked: frozenset[str | None]
    """Names of the sets to evaluate; seeds depend on the others too."""
    reward_funcs: list[Any]


def read_job(checkpoint: Path, flags: Sequence[str], sets: Sequence[str]) -> EvaluationJob:
    """Read settings: flags override those of the last attempt of the checkpoint's run.

    Raises:
        ValueError: they cannot be read, or need a trainer.
    """
    found, attempt = _OF_ATTEMPT.fullmatch(checkpoint.resolve().name), _last_attempt(checkpoint.resolve().parent)
    command = [str(word) for word in attempt.get("command", [])]
    ranks = int(attempt.get("topology", {}).get("world_size", 1))
    config = type("ConfigOfTheRun", (ConfigElsewhere,), {"ranks": ranks})
    parse = partial(parse_arguments, config_type=config, world_size=ranks)
    is_recipe = bool(command) and Path(command[0]).name == _SCRIPT and not _has_own_options(command[1:], parse)
    own = command[1:] if is_recipe else ["--model_name_or_path", str(checkpoint.resolve())]  # else it is the demo's
    if not command and not flags:
        raise ValueError(
            f"beside {checkpoint} is no {HISTORY_FILE}, so nothing says what to evaluate: give flags of train.py after "
            "` -- `, such as --config FILE"
        )
    if command and not is_recipe and not flags:
        raise ValueError(
            f"the run was started as {command[0]}, whose data and rewards are its own: give them as flags of train.py "
            "after ` -- ` (--dataset_name, --reward_funcs, ...), or call trainer.evaluate() in the script"
        )
    arguments = parse([*own, *flags])
    _check(arguments)
    training, model = arguments.training, arguments.model
    own_kwargs = {"revision": model.model_revision, "dtype": model.dtype}
    training.model_init_kwargs = {**own_kwargs, **(training.model_init_kwargs or {})}
    rows = _rows_of(arguments)
    by_name: dict[str | None, Any] = dict(rows) if isinstance(rows, dict) else {None: rows}
    if unknown := [name for name in sets if name not in by_name]:
        there = [name for name in by_name if name is not None]
        known = f"the run has {', '.join(there)}" if there else "the run has one set, without a name"
        raise ValueError(f"--set {unknown[0]}: {known}{did_you_mean(unknown[0], there)}")
    return EvaluationJob(
        checkpoint=checkpoint.resolve(),
        step=int(found[1]) if found else 0,
        ranks=ranks,
        arguments=arguments,
        sets=by_name,
        asked=frozenset(sets or by_name),
        reward_funcs=rewards_of(arguments),
    )


def _has_own_options(words: list[str], parse: Callable[[list[str]], Arguments]) -> bool:
    """True for a script that has the name of ours, and options that ours does not know."""
    try:
        parse(words)
    except UnknownArgumentsError:
        return True
    except ValueError:  # raised again with the flags, if they do not replace the value
        pass
    return False


def _last_attempt(folder: Path) -> dict[str, Any]:
    try:
        return read_attempts(folder)[-1]
    except FileNotFoundError:
        return {}
    except (IndexError, *DAMAGED) as error:
        raise ValueError(f"{folder / HISTORY_FILE} cannot be read: {type(error).__name__}: {error}") from None


def _check(arguments: Arguments) -> None:
    training = arguments.training
    refusal = getattr(training, "refusal", None)
    if refusal is not None:
        raise ValueError(refusal)
    if arguments.script.reward_model_name_or_path:
        raise ValueError(
            "reward_model_name_or_path is set, and a reward model needs a trainer's GPUs: name functions with "
            "--reward_funcs instead"
        )
    check_evaluating(training)


def _rows_of(arguments: Arguments) -> Any:
    if arguments.is_demo:
        return demo_dataset("test")
    arguments.training.eval_strategy = "steps"  # even if the run did not evaluate
    script = arguments.script
    if not (script.eval_datasets or script.dataset_name or arguments.mixture.datasets):
        raise ValueError("no data to evaluate on: give --dataset_name or --eval_datasets after ` -- `")
    rows = load_evaluation(arguments, {} if script.eval_datasets else load_data(arguments))
    for part in rows.values() if isinstance(rows, dict) else [rows]:
        if not hasattr(part, "__len__"):
            raise ValueError(
                "dataset_streaming is set: an evaluation without a trainer needs all rows; set it to false"
            )
        if "image" in part.column_names or "images" in part.column_names:
            raise ValueError("the prompts come with images: evaluate them in the run (--eval_strategy steps)")
    return rows
