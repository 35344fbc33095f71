"""`python -m bench.tables`: writes the tables of `bench/RESULTS.md` from `bench/results/*.json`.

Only what stands between the two markers is replaced; the rest of the file is written by hand. A result that is older
than the code it measures (`bench/measured.py`) is marked.
"""

import json
import sys
from pathlib import Path
from typing import Any

from bench.measured import MEASURED, staleness, stamp
from bench.report import RESULTS, Figure, Ratio, goal, is_plain, number, spread

DOCUMENT = RESULTS.parent / "RESULTS.md"
BEGIN, END = "<!-- tables: written by `python -m bench.tables` -->", "<!-- end of the tables -->"


def markdown(results: Path) -> str:
    """A section for each benchmark, with its result on GPUs after the one without; one that has none says so."""
    sections = []
    for name in MEASURED:
        paths = [path for path in (results / f"{name}.json", results / f"{name}-cuda.json") if path.exists()]
        sections += [_section(json.loads(path.read_text())) for path in paths]
        if not paths:
            sections.append(f"## {name}\n\nNot run yet: `python -m bench.{name}`.\n")
        if (results / f"{name}.png").exists():
            sections.append(f"![{name}]({results.name}/{name}.png)\n")
    return "\n".join(sections)


def _section(result: dict[str, Any]) -> str:
    machine, settings = result["machine"], result["settings"]
    gpus = f", {len(machine['gpus'])} x {machine['gpus'][0]}" if machine["gpus"] else ", no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"## {result['benchmark']} ({settings['device']})",
        "",
        f"`{result['command']}`, {result['date'][:10]}, {stamp(result)}; {machine['cores']} cores ({machine['cpu']}), "
        f"{machine['memory_gib']:g} GiB{gpus}; {versions}.",
        "",
        *((stale, "") if (stale := staleness(result)) else ()),
        "Settings: " + ", ".join(f"{name} {value}" for name, value in settings.items() if is_plain(value)) + ".",
        "",
        "| | median | min .. max | unit | goal |",
        "|---|---:|---:|---|---|",
    ]
    for row in result["ratios"]:
        ratio = Ratio(name=row["name"], values=tuple(row["values"]), goal=row["goal"])
        lines.append(f"| **{ratio.name}** | **{number(ratio.median)}** | {spread(ratio)} | | {goal(ratio)} |")
    for row in result["figures"]:
        figure = Figure(name=row["name"], unit=row["unit"], values=tuple(row["values"]))
        lines.append(f"| {figure.name.strip()} | {number(figure.median)} | {spread(figure)} | {figure.unit} | |")
    lines += ["", *(f"- {note}" for note in result["notes"]), ""]
    return "\n".join(lines)


def replace_tables(document: str, tables: str) -> str:
    """The document with these tables between its markers. Raises ValueError where a marker is missing."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the tables stand between the lines {BEGIN} and {END}: one of them is missing")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def main() -> None:
    DOCUMENT.write_text(replace_tables(DOCUMENT.read_text(), markdown(RESULTS)))
    print(f"wrote the tables of {DOCUMENT}", file=sys.stderr)


if __name__ == "__main__":
    main()
