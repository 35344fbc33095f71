"""Data set of `train.py`: a mixture, a Hub data set, or a local file or folder, converted to prompts."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl import get_dataset

from grpo.faults.kinds import is_users
from grpo.ops.train.adapters import ADAPTERS
from grpo.ops.train.arguments import Arguments, GRPOScriptArguments
from grpo.ops.train.reasoning import PREFIX, load_tasks, tasks_of
from grpo.preflight.data import check_columns
from grpo.preflight.model import close_name, reason_of

if TYPE_CHECKING:
    from datasets import DatasetDict, IterableDatasetDict

_DATA_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def load_data(arguments: Arguments) -> "DatasetDict | IterableDatasetDict":
    """Load the data set by split: a mixture, a Hub data set, or a local file or folder, with renamed columns.

    Raises:
        ValueError: a local path holds no data set, or columns are missing.
    """
    from transformers import set_seed

    script = arguments.script
    if arguments.mixture.datasets:
        # TRL splits a mixture with numpy's global generator: without the same seed, every rank gets other rows.
        set_seed(arguments.training.seed)
        dataset = get_dataset(arguments.mixture)
    else:
        assert script.dataset_name, "`check_task` has seen a name"
        dataset = _load(
            script.dataset_name, script.dataset_config, script, split=script.dataset_train_split, option="dataset_name"
        )
    return _adapt(dataset, script)


def load_evaluation(arguments: Arguments, dataset: "DatasetDict | IterableDatasetDict") -> Any:
    """Load the evaluation sets: `eval_datasets` by name, else a split of the data set; None without evaluation.

    Raises:
        ValueError: as `load_data`.
    """
    script = arguments.script
    if arguments.training.eval_strategy == "no":
        return None
    if not script.eval_datasets:
        return split_of(dataset, script.dataset_test_split, "dataset_test_split")
    assert isinstance(script.eval_datasets, dict), "__post_init__ parses it"
    sets = {}
    for of_set, spec in script.eval_datasets.items():
        own = {"name": spec} if isinstance(spec, str) else spec
        option, split = f"eval_datasets[{of_set!r}]", own.get("split") or script.dataset_test_split
        sets[of_set] = split_of(
            _adapt(_load(own["name"], own.get("config"), script, split=split, option=option), script), split, option
        )
    return sets


def _load(name: str, config: str | None, script: GRPOScriptArguments, *, split: str, option: str) -> Any:
    """Load by split; a file is the requested split."""
    from datasets import load_dataset

    if name.startswith(PREFIX):
        assert not isinstance(script.task_settings, str), "__post_init__ parses it"
        sizes = {"size": script.dataset_size, "test_size": script.dataset_test_size, "seed": script.dataset_seed}
        return load_tasks(name, **sizes, settings=script.task_settings or {}, option=option)
    path, streaming = local_data(name, option), script.dataset_streaming
    try:
        if path is not None and path.is_file():
            return load_dataset(_DATA_BUILDERS[path.suffix], data_files={split: str(path)}, streaming=streaming)
        return load_dataset(name if path is None else str(path), name=config, streaming=streaming)
    except Exception as error:
        # for a broken file, `datasets` raises a generic error; its cause has the reason
        cause = error.__cause__ or error
        if not (is_users(error) and is_users(cause)):
            raise
        what = f"{type(cause).__name__}: {reason_of(cause)}"
        raise ValueError(f"{option} is {name!r}, which cannot be loaded: {what}") from error


def local_data(name: str, option: str = "dataset_name") -> Path | None:
    """Return the local path of a data set; None for a Hub id or tasks of reasoning-gym.

    Raises:
        ValueError: the path does not exist or holds no readable data, or a task is unknown.
    """
    if name.startswith(PREFIX):
        tasks_of(name, option)
        return None
    path = Path(name).expanduser()
    kinds = ", ".join(_DATA_BUILDERS)
    if path.is_file():
        if path.suffix not in _DATA_BUILDERS:
            raise ValueError(f"{option} is the file {name}, but only {kinds} can be read")
        if not path.stat().st_size:
            raise ValueError(f"{option} is the file {name}, which is empty")
        return path
    if path.is_dir():
        if not any(file.suffix in _DATA_BUILDERS for file in path.rglob("*")):
            raise ValueError(f"{option} is the folder {name}, which holds none of {kinds}")
        return path
    if path.suffix in _DATA_BUILDERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(
            f"{option} is {name}, but {path.absolute()} does not exist{close_name(path)}: a data set is a Hub id "
            f"such as openai/gsm8k, or a local file ({kinds}) or a folder of such files"
        )
    return None


def split_of(dataset: "DatasetDict | IterableDatasetDict", split: str, option: str) -> Any:
    if split not in dataset:
        raise ValueError(
            f"{option} is {split!r}, but the data set has the splits {', '.join(map(repr, dataset))}: set {option} to "
            "one of them (a local folder has those that its files are named after, such as train.jsonl and test.jsonl)"
        )
    return dataset[split]


def _adapt(dataset: Any, script: GRPOScriptArguments) -> Any:
    """Apply `dataset_adapter` or `dataset_columns` to rows, and `system_prompt` to prompts."""
    if script.dataset_adapter is not None:
        dataset = _adapt_rows(dataset, script.dataset_adapter)
    columns = script.dataset_columns or {}
    assert not isinstance(columns, str), "__post_init__ parses it"
    _check_names(dataset, columns, "dataset_columns renames {missing}", "rename those that are there")
    if columns:
        dataset = dataset.rename_columns(columns)
    if script.system_prompt is not None:
        check_columns(dataset, "the data set")
        dataset = dataset.map(_to_conversation, fn_kwargs={"system_prompt": script.system_prompt})
    return dataset


def _adapt_rows(dataset: Any, name: str) -> Any:
    """Apply the adapter to every split; a split without its columns is a mistake."""
    adapter = ADAPTERS[name]
    what, fix = f"dataset_adapter is {name}, which reads", f"take another adapter ({', '.join(ADAPTERS)})"
    _check_names(dataset, adapter.columns, f"{what} {', '.join(adapter.columns)}", f"{fix}, or dataset_columns")
    adapted = {split: rows.map(adapter.to_prompt, remove_columns=rows.column_names) for split, rows in dataset.items()}
    return type(dataset)(adapted)


def _check_names(dataset: Any, columns: Iterable[str], what: str, fix: str) -> None:
    for rows in dataset.values():
        names = rows.column_names
        missing = [] if names is None else [column for column in columns if column not in names]  # None: a stream
        if missing:
            what = what.format(missing=", ".join(missing))
            raise ValueError(f"{what}, but the data set has {', '.join(names)}: {fix}")


def _to_conversation(row: dict[str, Any], system_prompt: str) -> dict[str, Any]:
    if not isinstance(row["prompt"], str):
        raise ValueError("system_prompt is set, but the prompts of the data set are conversations already: remove it")
    return {"prompt": [{"role": "system", "content": system_prompt}, {"role": "user", "content": row["prompt"]}]}
