"""Completions of sampled prompts within the page's size: recurring prompts first, then some of all logs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo.ops.report.reading import first_line
from grpo.record.files import COMPLETIONS_FOLDER

MAX_BYTES = 1_200_000  # of the page's 5 MB
NEEDED = ("step", "prompt_id", "prompt", "completion", "reward")
DETAILS = ("advantage", "node", "engine", "policy_version", "completion_tokens", "stop_reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLimits:
    """Limits of the completions on a page."""

    prompts: int
    steps: int
    samples: int
    """Samples of one prompt at one step."""
    characters: int
    """Characters of one text."""


# The first that fits `MAX_BYTES` is used.
LIMITS = (
    PageLimits(prompts=96, steps=48, samples=16, characters=6000),
    PageLimits(prompts=24, steps=24, samples=16, characters=6000),
    PageLimits(prompts=16, steps=16, samples=12, characters=4000),
    PageLimits(prompts=12, steps=12, samples=8, characters=3000),
    PageLimits(prompts=8, steps=8, samples=6, characters=2000),
    PageLimits(prompts=8, steps=6, samples=4, characters=1000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Browser:
    """Prompts with their samples."""

    functions: tuple[str, ...]
    """Reward functions, in the order of a sample's rewards."""
    prompts: list[dict[str, Any]]
    """`set`, `text`, and `groups` by step: samples by reward, the best first."""
    note: str
    """Sentence on the parts left out."""

    def for_page(self) -> dict[str, Any]:
        return {"functions": self.functions, "prompts": self.prompts}


def read_completions(folder: Path, missing: list[str]) -> Browser | None:
    """Read the completions; None without any. Unreadable files get a line in `missing`."""
    files: dict[int, list[tuple[str, Path]]] = {}
    for path in sorted((folder / COMPLETIONS_FOLDER).glob("*step-*.parquet")):
        if found := re.fullmatch(r"(?:(eval)-(?:(.+)-)?)?step-(\d+)\.parquet", path.name):
            files.setdefault(int(found[3]), []).append((" ".join(filter(None, found.groups()[:2])), path))
    if not files:
        missing.append(f"{COMPLETIONS_FOLDER}/ holds no file: no completions")
        return None
    steps = sorted(files)
    rows: dict[int, list[dict[str, Any]]] = {}
    for step in spread_over(steps, LIMITS[0].steps):
        for of_set, path in files[step]:
            try:
                rows.setdefault(step, []).extend({**row, "set": of_set} for row in read_rows(path))
            except (OSError, ValueError, KeyError, pa.ArrowException) as error:
                missing.append(f"{COMPLETIONS_FOLDER}/{path.name} cannot be read ({first_line(error)})")
    if not any(rows.values()):
        return None
    functions = sorted({name for each in rows.values() for row in each for name in row if name.startswith("rewards/")})
    for limits in LIMITS:
        prompts = choose(rows, functions, limits)
        size = sum(
            len(sample[0].encode()) for each in prompts for group in each["groups"] for sample in group["samples"]
        )
        size += sum(len(each["text"].encode()) for each in prompts)
        if size <= MAX_BYTES:
            break
    return Browser(
        functions=tuple(name.removeprefix("rewards/") for name in functions),
        prompts=prompts,
        note=note_of(prompts, rows, len(steps), limits),
    )


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read one file of completions.

    Raises:
        OSError, ValueError, KeyError, ArrowException: the file is damaged or of another kind.
    """
    table = pq.read_table(path)
    if lacking := [name for name in NEEDED if name not in table.column_names]:
        raise KeyError(f"it has no column {', '.join(lacking)}")
    return [row for row in table.to_pylist() if row["prompt_id"] is not None and row["completion"] is not None]


def spread_over(each: Sequence[Any], most: int) -> list[Any]:
    """Pick at most `most` items: the first, the last, and evenly spaced ones between them."""
    if len(each) <= most:
        return list(each)
    last = len(each) - 1
    gaps = max(1, most - 1)
    return [each[round(index * last / gaps)] for index in range(most)]


def choose(rows: dict[int, list[dict[str, Any]]], functions: list[str], limits: PageLimits) -> list[dict[str, Any]]:
    """Choose prompts: first those recurring at most steps, then single ones evenly from early to late steps."""
    groups: dict[tuple[str, str], dict[int, list[dict[str, Any]]]] = {}
    for step in spread_over(sorted(rows), limits.steps):
        for row in rows[step]:
            groups.setdefault((row["set"], str(row["prompt_id"])), {}).setdefault(step, []).append(row)
    again = [each for each in groups if len(groups[each]) > 1]
    again.sort(key=lambda each: (-len(groups[each]), -max(groups[each])))
    chosen = again[: limits.prompts]
    once = [each for each in groups if len(groups[each]) == 1]
    chosen += spread_over(once, limits.prompts - len(chosen))
    return [
        {
            "set": each[0],
            "text": cut(str(next(iter(groups[each].values()))[0]["prompt"]), limits.characters),
            "groups": [
                {"step": step, "samples": samples_of(members, functions, limits)}
                for step, members in sorted(groups[each].items())
            ],
        }
        for each in chosen
    ]


def samples_of(rows: list[dict[str, Any]], functions: list[str], limits: PageLimits) -> list[list[Any]]:
    """Samples by reward; of many the best and the worst. Each: text, reward, rewards, and `DETAILS`."""
    ordered = sorted(rows, key=lambda row: -number(row["reward"]))
    if len(ordered) > limits.samples:
        ordered = ordered[: limits.samples - limits.samples // 2] + ordered[-(limits.samples // 2) :]
    return [
        [
            cut(str(row["completion"]), limits.characters),
            clean(row["reward"]),
            [clean(row.get(name)) for name in functions],
            *(clean(row.get(name)) for name in DETAILS),
        ]
        for row in ordered
    ]


def number(value: Any) -> float:
    """Sort key: non-numbers come last."""
    return float(value) if isinstance(value, int | float) and value == value else float("-inf")


def clean(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4) if value == value and abs(value) != float("inf") else None
    return value if value is None or isinstance(value, int) else str(value)


def cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}\n[… {len(text) - characters:,} characters more]"


def note_of(
    prompts: list[dict[str, Any]], rows: dict[int, list[dict[str, Any]]], num_steps: int, limits: PageLimits
) -> str:
    """Describe the omitted part in a sentence; '' if all is shown."""
    shown = {group["step"] for each in prompts for group in each["groups"]}
    total = len({(row["set"], row["prompt_id"]) for each in rows.values() for row in each})
    if len(shown) == num_steps and len(prompts) == total:
        return ""
    return (
        f"Shown: {len(prompts)} prompts at {len(shown)} of {num_steps} logged steps, at most {limits.samples} samples "
        f"of each, texts of at most {limits.characters:,} characters. All of them are in {COMPLETIONS_FOLDER}/."
    )
