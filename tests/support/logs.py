"""Reading the logs of a run as a person does who has never seen the code: by time, process and text."""

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_LINE = re.compile(r"(\S{23}Z) (DEBUG|INFO|WARNING|ERROR) (\S+) (\S+) (grpo\.\S+): (.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One record."""

    time: datetime
    level: str
    process: str
    """`rank-node1-1`, say."""
    thread: str
    logger: str
    text: str


def read_log(output_dir: Path, process: str) -> list[Line]:
    """The records in the log of a process of the first attempt, in their order."""
    lines = []
    for line in (output_dir / "logs" / f"{process}.attempt-0.log").read_text().splitlines():
        if match := _LINE.fullmatch(line):
            time, level, who, thread, logger, text = match.groups()
            found = Line(
                time=datetime.fromisoformat(time), level=level, process=who, thread=thread, logger=logger, text=text
            )
            lines.append(found)
    return lines


def find(lines: list[Line], pattern: str, after: int = -1) -> int:
    """The index of the first record behind number `after` whose text begins as `pattern` says."""
    for index, line in enumerate(lines):
        if index > after and re.match(pattern, line.text):
            return index
    raise AssertionError(f"no {pattern!r} behind number {after} of:\n" + "\n".join(line.text for line in lines))
