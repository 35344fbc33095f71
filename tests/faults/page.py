"""`docs/faults.md`, written from the matrix and from what was found."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.faults.matrix import FAULTS, LAYOUTS, PHASES, PROMISED_S, Cell, cells
from tests.faults.stamps import code_of

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "faults.md"
NOT_RUN = "not run"
HOLDS, STALE, WRONG = "holds", "stale", "wrong"

HEAD = f"""# Fault matrix

Every fault in every phase, injected into a real job on CPUs: a small model, two or three ranks with ZeRO-3, vLLM
engines. Specified are {PROMISED_S:.0f} s at most, from the fault to the job's last process, with one record on every
rank that names node, rank, phase and cause, and nothing left behind; or, where a cell says "goes on", to the next
step. A deadline that is set (`reward_timeout`) comes on top. [Fault tolerance](fault_tolerance.md) is the short form.

Cells: seconds until the job ended as specified. "goes on": the job went on, with the seconds to its next step. "!":
not as specified, see below. "*": stale, the code that the cell exercises has changed since (comments aside;
`tests/faults/stamps.py` lists it). "not run": no result yet. A letter: the reason why the cell is never run, below.
`make faults` runs all of it (`python -m tests.faults.run --jobs 3`: about 70 minutes on two cores),
`python -m tests.faults.run --stale` the stale cells, and `python -m tests.faults.run 'host-*/sync/*'` some; each writes
this page.
"""


def read_results() -> dict[str, dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_results(results: Mapping[str, Mapping[str, Any]]) -> None:
    known = {cell.name for cell in cells() if cell.expected is not None}
    kept = {name: results[name] for name in sorted(results) if name in known}
    RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False).replace(f"{ROOT}/", "") + "\n")


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The page's text."""
    by_place = {(cell.fault.name, cell.phase, cell.layout): cell for cell in cells()}
    shown_here = (cell for cell in by_place.values() if cell.layout in cell.fault.layouts)
    reasons = list(dict.fromkeys(cell.why_not for cell in shown_here if cell.why_not))
    letters = {why: _letter(number) for number, why in enumerate(reasons)}
    parts = [HEAD, f"\n{_how_old(results)}\n"]
    for layout, shown in LAYOUTS.items():
        parts += [
            f"\n## {layout.capitalize()} node{'' if layout == 'one' else 's'}\n",
            f"{shown[0].upper()}{shown[1:]}.\n",
        ]
        parts += [f"| fault | {' | '.join(PHASES)} |", f"|---|{'---|' * len(PHASES)}"]
        for fault in (each for each in FAULTS if layout in each.layouts):
            shown_cells = [_shown(by_place[fault.name, phase, layout], results, letters) for phase in PHASES]
            parts.append(f"| {fault.shown} | {' | '.join(shown_cells)} |")
    parts.append("\n## The phases\n")
    parts += [f"- **{phase}**: {shown}." for phase, shown in PHASES.items()]
    parts.append("\n## Why a cell is not run\n")
    parts += [f"- **{letter}**: {why}." for why, letter in letters.items()]
    wrong = [(name, result) for name, result in results.items() if result["wrong"]]
    if wrong:
        parts.append("\n## Not as specified\n")
        parts += [f"- `{name}`: {'; '.join(_short(each) for each in result['wrong'])}." for name, result in wrong]
    return "\n".join(parts) + "\n"


def state_of(cell: Cell, results: Mapping[str, Mapping[str, Any]]) -> str:
    """What is known of a cell that can be run: nothing, or whether its result is of this code, and good."""
    result = results.get(cell.name)
    if result is None:
        return NOT_RUN
    if result["wrong"]:
        return WRONG
    return HOLDS if result.get("code") == code_of(cell) else STALE


def _how_old(results: Mapping[str, Mapping[str, Any]]) -> str:
    """How many cells hold, and of which commits all of them are."""
    states = [state_of(cell, results) for cell in cells() if cell.expected is not None]
    seen = Counter((each.get("commit") or "unknown", each.get("date") or "unknown") for each in results.values())
    commits = "; ".join(f"{count} of commit {commit} ({day})" for (commit, day), count in sorted(seen.items()))
    return f"{states.count(HOLDS)} of {len(states)} cells are of the code as it is. Results: {commits}."


def write_page(results: Mapping[str, Mapping[str, Any]]) -> None:
    PAGE.write_text(page(results))


def _letter(number: int) -> str:
    return chr(ord("a") + number)


def _shown(cell: Cell, results: Mapping[str, Mapping[str, Any]], letters: Mapping[str, str]) -> str:
    if cell.expected is None:
        return letters[cell.why_not]
    result = results.get(cell.name)
    if result is None:
        return NOT_RUN
    seconds = "!" if result["seconds"] is None else f"{result['seconds']:.0f}{' !' if result['wrong'] else ''}"
    if result.get("code") != code_of(cell):
        seconds += "\\*"
    return f"goes on, {seconds}" if cell.expected.goes_on and not result["wrong"] else seconds


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:199]}…"


if __name__ == "__main__":
    write_page(read_results())
