"""What was said to a sample of the prompts, for every log: `completions/step-<step>.parquet` (docs/metrics.md).

Beside TRL's own `log_completions`, which writes `completions_<step>.parquet` in the same folder: those are left alone.
All of it is rank 0's, and none of it collective.
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
"""Six whole numbers for each completion, beside what TRL keeps; `stop_reason` is an index into `STOP_REASONS`."""

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
    """A prompt or a completion as a person reads it: of one message its text, of several each under its role."""
    if isinstance(messages, str):
        text = messages
    elif len(messages) == 1:
        text = _text_of_message(messages[0])
    else:
        text = "\n\n".join(f"{message.get('role', '?')}: {_text_of_message(message)}" for message in messages)
    return text.encode(errors="replace").decode()  # half a surrogate pair, which JSON lets through, is no UTF-8


def _text_of_message(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(map(_text_of_block, content))
    calls = message.get("tool_calls")
    return content + (json.dumps(calls, default=str) if calls else "")


@contextlib.contextmanager
def plain_tool_calls(logs: dict[str, Any]) -> Iterator[None]:
    """Around TRL's own writing of completions (1.16), in whose files the arguments of all calls have to fit one type:
    they are text meanwhile. A tool without arguments, or one `a` that is a number and one that is text, would end the
    training.

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
    """A text, or texts in lists and mappings, without what a terminal takes for a command: control characters but line
    feed and tab are written out.

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
    """TRL's printing of completions (1.16), for a terminal."""

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
    """Equal for equal prompts."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:8]


def choose_prompts(prompt_ids: Iterable[str], num_prompts: int) -> set[str]:
    """The smallest ones, so that a prompt that comes again is chosen again."""
    return set(sorted(set(prompt_ids))[:num_prompts])


def sampled_rows(
    logs: Mapping[str, Any],
    facts: Collection[list[int] | None],
    *,
    num_prompts: int,
    reward_weights: Sequence[float],
) -> list[Row]:
    """All completions of the chosen prompts of the newest batch, for `CompletionSamples.write`.

    Args:
        logs: TRL's `trainer._logs` (1.16), which hold the newest `generation_batch_size` rows of all ranks, on every
            rank and whatever `log_completions` says; of evaluation, too.
        facts: `FACTS` of each of these rows; None for a row that is not asked for, one of evaluation, say.
        reward_weights: of the reward functions, in their order. Where two functions have one name, TRL keeps the second
            one's rewards alone: `reward` is then not known.
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
    """The sum that TRL's `reward` is the mean of; None where no function has judged (NaN)."""
    judged = [reward * weight for reward, weight in zip(rewards, weights, strict=True) if not math.isnan(reward)]
    return sum(judged) if judged else None


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


# -- files ------------------------------------------------------------------------------------------------------------


def evaluation_prefix(of_set: str | None) -> str:
    """Of the name of a file with an evaluation's completions; what a file's name does not take is written as `_`.

    Args:
        of_set: the set's name; None: there is one, without a name.

    Example:
        >>> evaluation_prefix("math/hard")
        'eval-math_hard-'
    """
    return "eval-" if of_set is None else "eval-" + re.sub(r"[^\w.-]", "_", of_set) + "-"


class CompletionSamples:
    """`<output_dir>/completions/`, made with the first file, of at most `MAX_BYTES`.

    Beyond, what was quarantined goes first, and then every second file of the older half; the first and the newest
    stay.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_warned = False
        self._held_bytes: int | None = None  # None: nobody has looked

    def write(self, step: int, attempt: int, time: float, rows: Sequence[Row], *, prefix: str = "") -> None:
        """The file of a log, whole at once; that it cannot be written is reported once, and is no reason to fail.

        Args:
            time: Unix seconds.
            rows: of `sampled_rows`; none: no file.
            prefix: of the file's name, `evaluation_prefix` of an evaluation.
        """
        if not rows:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            table = _table([{"time": time, "attempt": attempt, "step": step, **row} for row in rows])
            write_atomically(self.folder / f"{prefix}step-{step:08}.parquet", table)
            if self._held_bytes is not None:
                self._held_bytes += len(table)
            # Not at every log: a network's file system is slow to look through.
            if self._held_bytes is None or self._held_bytes > MAX_BYTES:
                self._thin()
        except OSError as error:
            if not self._has_warned:
                warnings.warn(f"cannot write completions to {self.folder}: {error}", stacklevel=2)
            self._has_warned = True

    def cut(self, step: int, attempt: int) -> None:
        """Quarantine in `attempt-<attempt>` what is later than `step`: this attempt goes on there."""
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
        """What is in the folder under such names, with their numbers and in that order."""
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
    except OSError:  # somebody else has removed it
        return 0


def _table(rows: Sequence[Row]) -> bytes:
    names = list(dict.fromkeys(name for row in rows for name in row))
    schema = pa.schema([(name, _TYPES.get(name, pa.float64())) for name in names])
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), sink, compression="zstd")
    return sink.getvalue().to_pybytes()
