"""reasoning-gym's tasks as data sets: rows are generated on load, with a held-out seed, and scored by the task's own
scorer (https://github.com/open-thought/reasoning-gym)."""

import ast
import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo.ops.train.adapters import last_boxed
from grpo.ops.train.completion import Completion, text_of
from grpo.place.spelling import did_you_mean

if TYPE_CHECKING:
    from datasets import DatasetDict

PREFIX = "reasoning_gym:"
HELD_OUT = 10**9
"""Distance of the test split's seed from the training seed: item i is drawn with seed + i, so close seeds give the same
items."""
MAX_DRAWS = 8  # times the number of rows, to fill a test split without training questions
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def tasks_of(name: str, option: str = "dataset_name") -> list[str]:
    """Return the tasks in a data set's name: `reasoning_gym:chain_sum,leg_counting`.

    Raises:
        ValueError: the library is not installed, or has no such task.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ValueError(
            f"{option} is {name!r}, but reasoning-gym is not installed [GRPO-113]: pip install 'grpo-local[tasks]'"
        )
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]

    tasks = [task.strip() for task in name.removeprefix(PREFIX).split(",") if task.strip()]
    if not tasks:
        raise ValueError(f"{option} is {name!r}: name tasks behind the colon, such as {PREFIX}chain_sum,leg_counting")
    for task in tasks:
        if task not in DATASETS or task == "composite":
            raise ValueError(
                f"{option} is {name!r}, but reasoning-gym has no task {task!r}{did_you_mean(task, DATASETS)}"
            )
    return tasks


def load_tasks(
    name: str,
    *,
    size: int,
    test_size: int,
    seed: int,
    settings: Mapping[str, Mapping[str, Any]],
    option: str = "dataset_name",
) -> "DatasetDict":
    """Generate the splits `train` and `test`, the same on every rank and in every run; `test` has no training question.

    Args:
        name: see `tasks_of`; rows take the tasks in turn.
        size, test_size: rows of each split.
        seed: of `train`; `test` has one of its own.
        settings: difficulty of each task by name, in reasoning-gym's own settings.

    Returns:
        Columns `prompt` (the question as text), `answer`, `task`, and `metadata`, a literal for the scorer.

    Raises:
        ValueError: unknown task or setting, or too few questions to hold some out.
    """
    from datasets import Dataset, DatasetDict

    tasks = tasks_of(name, option)
    if unknown := settings.keys() - {*tasks}:
        raise ValueError(
            f"task_settings is for {', '.join(sorted(unknown))}, but {option} is {name!r}"
            f"{did_you_mean(min(unknown), tasks)}"
        )
    train = _in_turn(tasks, size, lambda task, count: _items(task, count, seed, settings.get(task, {})))
    known = {row["prompt"] for row in train}

    def held_out(task: str, count: int) -> list[dict[str, Any]]:
        drawn = _items(task, MAX_DRAWS * count, seed + HELD_OUT, settings.get(task, {}))
        others = {row["prompt"]: row for row in drawn if row["prompt"] not in known}
        if len(others) < count:
            raise ValueError(
                f"task {task} has too few questions: of {len(drawn)} drawn for the test split {len(others)} are not "
                f"among the {size} rows of training, and {count} are wanted; lower dataset_size or dataset_test_size, "
                "or widen the task by task_settings"
            )
        return [*others.values()][:count]

    return DatasetDict(train=Dataset.from_list(train), test=Dataset.from_list(_in_turn(tasks, test_size, held_out)))


def reasoning_gym_answer(
    completions: Sequence[Completion],
    answer: Sequence[str | None],
    metadata: Sequence[str],
    task: Sequence[str],
    **_: Any,
) -> list[float]:
    """Score answers by their tasks' own scorers, 0 to 1.

    First the answer is extracted: the text in the last `<answer>` and `</answer>`, or else in the last `\\boxed{}`, or
    else all of it. Longer text around the right answer scores by the answer's share of its length. An answer unreadable
    for a scorer counts 0.
    """
    texts = map(text_of, completions)
    return [_score(*row) for row in zip(texts, answer, metadata, task, strict=True)]


def extract_answer(text: str) -> str:
    """See `reasoning_gym_answer`."""
    if tagged := _TAGGED.findall(text):
        return tagged[-1].strip()
    try:
        return last_boxed(text).strip()
    except ValueError:
        return text.strip()


# -- rows -------------------------------------------------------------------------------------------------------------


def _in_turn(tasks: Sequence[str], size: int, make: Callable[[str, int], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    counts = [len(range(number, size, len(tasks))) for number in range(len(tasks))]
    rows = [iter(make(task, count) if count else []) for task, count in zip(tasks, counts, strict=True)]
    return [next(rows[number % len(tasks)]) for number in range(size)]


def _items(task: str, count: int, seed: int, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    import reasoning_gym  # type: ignore[import-untyped]

    try:
        made = reasoning_gym.create_dataset(task, size=count, seed=seed, **settings)
        items = [made[number] for number in range(count)]
    except (TypeError, ValueError, AssertionError) as error:  # its own checks of the settings
        raise ValueError(
            f"reasoning-gym cannot make {task} with the settings {dict(settings)}: {type(error).__name__}: {error}"
        ) from error
    rows = [
        {
            "prompt": item["question"],
            "answer": item["answer"],
            "task": task,
            "metadata": _literal(item["metadata"], task),
        }
        for item in items
    ]
    if items and (own := made.score_answer(items[0]["answer"], items[0])) != (
        read := _score_answer(items[0]["answer"], rows[0]["answer"], rows[0]["metadata"], task)
    ):
        raise ValueError(f"task {task} scores its own answer {own}, and {read} as a row: its metadata are no text")
    return rows


def _literal(metadata: Any, task: str) -> str:
    """Write as a Python literal: it preserves tuples and number keys, which JSON does not."""
    text = repr(metadata)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json.dumps(metadata, default=str)
    return text


def _score(text: str, known: str | None, metadata: str, task: str) -> float:
    try:
        return float(_score_answer(extract_answer(text), known, metadata, task))
    except Exception:  # noqa: BLE001  a scorer parses the model's text
        return 0.0


def _score_answer(given: str | None, known: str | None, metadata: str, task: str) -> float:
    item = {"question": "", "answer": known, "metadata": _read(metadata)}
    score = _scorer(task)(given, item)
    if known and given and known in given and len(given.split()) > len(known.split()):
        return min(score, len(known) / len(given))  # most scorers do so by themselves, but not all
    return score


@functools.lru_cache(maxsize=4096)
def _read(metadata: str) -> Any:
    try:
        return ast.literal_eval(metadata)
    except (ValueError, SyntaxError):
        return json.loads(metadata)


@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
