"""The page of commands, from the parsers of `grpo`: `python -m tools.commands_page` writes docs/commands.md."""

import argparse
import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from grpo.cli import COMMANDS
from tools.markdown import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "commands.md"
PAGES = {
    "init": "install.md#using-it-as-a-library",
    "launch": "launch.md",
    "plan": "plan-and-doctor.md",
    "doctor": "plan-and-doctor.md",
    "eval": "evaluation.md",
    "export": "export.md",
    "report": "report.md",
    "trace": "trace.md",
    "reshape": "resume.md#another-number-of-ranks-grpo-reshape",
    "constraints": "install.md",
}
"""Where each is explained."""

HEAD = """# Commands

Every command of `grpo` with its options, written from the parsers (`python -m tools.commands_page`); `--help` prints
the same. You may write options with dashes or underscores. `train.py --help` has the options of a run, and
[Options](options.md) the fields of `GRPOConfig`.
"""


@contextlib.contextmanager
def without_job() -> Iterator[None]:
    """Defaults as they are outside of a job."""
    taken = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(("GRPO_", "SLURM_"))}
    try:
        yield
    finally:
        os.environ.update(taken)


def shown(action: argparse.Action) -> str:
    """Names and value, as they are typed."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    if action.nargs == 0:
        return names
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    return f"{names} `{value}`"


def meaning(action: argparse.Action) -> str:
    return " ".join(str(action.help or "").split()) % (vars(action) | {"prog": "grpo"})


def of_command(name: str) -> str:
    module, description = COMMANDS[name]
    parser = argparse.ArgumentParser(prog=f"grpo {name}", add_help=False)
    importlib.import_module(module).add_arguments(parser)
    rows = [[shown(each), meaning(each)] for each in parser._actions if each.help is not argparse.SUPPRESS]
    lead = f"{description[0].upper()}{description[1:]}. [More]({PAGES[name]})"
    return f"## `grpo {name}`\n\n{lead}\n\n" + (table(["option", "meaning"], rows) if rows else "No options.")


def page() -> str:
    with without_job():
        return "\n\n".join([HEAD.rstrip(), *map(of_command, COMMANDS)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
