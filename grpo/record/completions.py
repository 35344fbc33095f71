"""Samples of completions for every log step: `completions/step-<step>.parquet` (docs/metrics.md).

Independent of TRL's own `log_completions`, whose `completions_<step>.parquet` in the same folder are left alone.
Everything here runs on rank 0, and nothing is collective.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import math
import re
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.record.durable import write_atomically

MAX_BYTES = 200 * 2**20
STOP_REASONS = ("stop", "length", "refused")
FACTS = ("node", "engine", "policy_version", "prompt_tokens", "completion_tokens", "stop_reason")
"""Six integers per completion, beside TRL's columns; `stop_reason` is an index into `STOP_REASONS`."""

_WRITTEN_OUT = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_OURS = re.compile(r"(?:eval-.+-|eval-)?step-(?P<number>\d{8,})\.parquet")
_ASIDE = re.compile(r"attempt-(?P<number>\d+)")
_TYPES = {
    "time": pa.float64(),
    "attempt": pa.int32(),
    "step": pa.int64(),
    "prompt_id": pa.string(),
    "prompt": pa.string(),
    "completion": pa.string(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "node": pa.int32(),
    "engine": pa.int32(),
    "policy_version": pa.int64(),
    "prompt_tokens": pa.int32(),
    "completion_tokens": pa.int32(),
    "stop_reason": pa.string(),
}

Row = dict[str, Any]


# -- rows -------------------------------------------------------------------------------------------------------------


def text_of(messages: Any) -> str:
    """Format a prompt or completion for reading: the text of a single message, else each message under its role."""
    if isinstance(messages, str):
        text = messages
    elif len(messages) == 1:
        text = _text_of_message(messages[0])
    else:
        text = "\n\n".join(f"{message.get('role', '?')}: {_text_of_message(message)}" for message in messages)
    return text.encode(errors="replace").decode()  # JSON allows a lone surrogate, UTF-8 does not


def _text_of_message(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(map(_text_of_block, content))
    calls = message.get("tool_calls")
    return content + (json.dumps(calls, default=str) if calls else "")


@contextlib.contextmanager
def plain_tool_calls(logs: dict[str, Any]) -> Iterator[None]:
    """Turn tool calls' arguments into text while TRL writes its completions (1.16).

    In TRL's files the arguments of all calls must fit one type: a tool without arguments, or an argument that is once a
    number and once a text, would end training.

    Args:
        logs: TRL's `trainer._logs`.
    """
    kept = logs["completion"]
    logs["completion"] = type(kept)(map(_with_plain_calls, kept), getattr(kept, "maxlen", None))
    try:
        yield
    finally:
        logs["completion"] = kept


def printable(value: Any) -> Any:
    """Escape control characters except line feed and tab, in a text or in texts inside lists and mappings: a terminal
    would take them for commands.

    Example:
        >>> printable(["\\x1b[2Jred"])
        ['\\\\x1b[2Jred']
    """
    if isinstance(value, str):
        return value.translate(_WRITTEN_OUT)
    if isinstance(value, Mapping):
        return {printable(name): printable(each) for name, each in value.items()}
    return [*map(printable, value)] if isinstance(value, list | tuple | deque) else value


def print_printable(print_sample: Callable[..., None]) -> Callable[..., None]:
    """Wrap TRL's printing of completions (1.16), with `printable` texts."""

    @functools.wraps(print_sample)
    def print_cleaned(prompts: Any, completions: Any, *args: Any, extra: Any = None, **kwargs: Any) -> None:
        print_sample(printable(prompts), printable(completions), *args, extra=printable(extra), **kwargs)

    return print_cleaned


def _text_of_block(block: Any) -> str:
    return (block.get("text") or f"[{block.get('type', '?')}]") if isinstance(block, Mapping) else str(block)


def _with_plain_calls(completion: Any) -> Any:
    if isinstance(completion, str):
        return completion
    return [*map(_plain, completion)]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(message)
    if isinstance(plain.get("content"), list):
        plain["content"] = "".join(map(_text_of_block, plain["content"]))
    if "tool_calls" in plain:
        plain["tool_calls"] = [*map(_with_plain_arguments, plain["tool_calls"] or [])]
    return plain


def _with_plain_arguments(call: Any) -> Any:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), default=str)}}


def prompt_id(prompt: str) -> str:
    """Hash of a prompt, as 8 hex digits."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def choose_prompts(prompt_ids: Iterable[str], num_prompts: int) -> set[str]:
    """Choose the smallest ids, so that a repeated prompt is chosen again."""
    return set(sorted(set(prompt_ids))[:num_prompts])


def sampled_rows(
    logs: Mapping[str, Any],
    facts: Collection[list[int] | None],
    *,
    num_prompts: int,
    reward_weights: Sequence[float],
) -> list[Row]:
    """Return all completions of the chosen prompts of the newest batch, for `CompletionSamples.write`.

    Args:
        logs: TRL's `trainer._logs` (1.16): the newest `generation_batch_size` rows of all ranks, on every rank,
            regardless of `log_completions`; evaluation included.
        facts: `FACTS` of each of these rows; None for a row to leave out, such as evaluation's.
        reward_weights: in the order of the reward functions. If two functions share a name, TRL keeps only the second
            one's rewards: `reward` is then unknown.
    """
    prompts = [text_of(prompt) for prompt in logs["prompt"]]
    completions, advantages = list(logs["completion"]), list(logs["advantages"])
    rewards = {name: list(values) for name, values in logs["rewards"].items()}
    assert len(prompts) == len(completions) == len(advantages) == len(facts), (len(prompts), len(facts))
    ids = [prompt_id(prompt) for prompt in prompts]
    chosen = choose_prompts((each for each, known in zip(ids, facts, strict=True) if known is not None), num_prompts)
    rows = []
    for index, known in enumerate(facts):
        if known is None or ids[index] not in chosen:
            continue
        of_functions = [rewards[name][index] for name in rewards]
        row: Row = {"prompt_id": ids[index], "prompt": prompts[index], "completion": text_of(completions[index])}
        is_whole = len(of_functions) == len(reward_weights)
        row["reward"] = weighted(of_functions, reward_weights) if is_whole else None
        row |= {f"rewards/{name}": _number(value) for name, value in zip(rewards, of_functions, strict=True)}
        row |= {"advantage": _number(advantages[index]), **dict(zip(FACTS, known, strict=True))}
        row["stop_reason"] = STOP_REASONS[row["stop_reason"]]
        rows.append(row)
    return rows


def weighted(rewards: Sequence[float], weights: Sequence[float]) -> float | None:
    """Weighted sum of a completion's rewards, as in TRL's `reward`; None if no function has scored it (NaN)."""
    judged = [reward * weight for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(judged) if judged else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


# -- files ------------------------------------------------------------------------------------------------------------


def evaluation_prefix(of_set: str | None) -> str:
    """Prefix of the files with an evaluation's completions; characters not allowed in file names become `_`.

    Args:
        of_set: the set's name; None for a single set without a name.

    Example:
        >>> evaluation_prefix("math/hard")
        'eval-math_hard-'
    """
    return "eval-" if of_set is None else "eval-" + re.sub(r"[^\w.-]", "_", of_set) + "-"


class CompletionSamples:
    """Folder `<output_dir>/completions/`, created with its first file, of at most `MAX_BYTES`.

    Beyond it, quarantined files are deleted first, then every second file of the older half; the first and the newest
    stay.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_warned = False
        self._held_bytes: int | None = None  # None: not measured yet

    def write(self, step: int, attempt: int, time: float, rows: Sequence[Row], *, prefix: str = "") -> None:
        """Write the file of a log step atomically. Failure to write is warned of once, and does not fail the job.

        Args:
            time: Unix seconds.
            rows: from `sampled_rows`; without rows no file is written.
            prefix: of the file's name, `evaluation_prefix` for an evaluation.
        """
        if not rows:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            table = _table([{"time": time, "attempt": attempt, "step": step, **row} for row in rows])
            write_atomically(self.folder / f"{prefix}step-{step:08}.parquet", table)
            if self._held_bytes is not None:
                self._held_bytes += len(table)
            # Not at every log step: network file systems list slowly.
            if self._held_bytes is None or self._held_bytes > MAX_BYTES:
                self._thin()
        except OSError as error:
            if not self._has_warned:
                warnings.warn(f"cannot write completions to {self.folder}: {error}", stacklevel=2)
            self._has_warned = True

    def cut(self, step: int, attempt: int) -> None:
        """Move files later than `step` to `attempt-<attempt>`: this attempt continues from there."""
        for draft in self.folder.glob(".*step-*"):  # of an attempt that was killed
            draft.unlink(missing_ok=True)
        later = [path for number, path in self._numbered(_OURS) if number > step]
        if not later:
            return
        aside = self.folder / f"attempt-{attempt}"
        aside.mkdir(exist_ok=True)
        for path in later:
            path.replace(aside / path.name)
        self._held_bytes = None

    def _numbered(self, names: re.Pattern[str]) -> list[tuple[int, Path]]:
        """Return (number, path) of the matching files, sorted by number."""
        children = list(self.folder.iterdir()) if self.folder.is_dir() else []
        found = ((names.fullmatch(path.name), path) for path in children)
        return sorted((int(match["number"]), path) for match, path in found if match)

    def _thin(self) -> None:
        files = [path for _, path in self._numbered(_OURS)]
        asides = [found for _, path in self._numbered(_ASIDE) if (found := [*path.iterdir()])]
        sizes = {path: _size(path) for path in itertools.chain(files, *asides)}
        while sum(sizes.values()) > MAX_BYTES:
            doomed = asides.pop(0) if asides else files[1 : min(max(len(files) // 2, 2), len(files) - 1) : 2]
            if not doomed:
                break
            for path in doomed:
                path.unlink(missing_ok=True)
                del sizes[path]
            files = [path for path in files if path in sizes]
        self._held_bytes = sum(sizes.values())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # another process has removed it
        return 0


def _table(rows: Sequence[Row]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    schema = pa.schema([(name, _TYPES.get(name, pa.float64())) for name in names])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()
