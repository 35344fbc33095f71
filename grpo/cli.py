"""The command `grpo`: tools to run before and around a job. `grpo init --help`, `grpo plan --help`, …"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from grpo import __version__
from grpo.place.importing import quiet
from grpo.place.spelling import did_you_mean

# Each module has `add_arguments(parser)` and `run(args) -> exit code`; only the requested one is imported.
COMMANDS = {
    "init": (
        "grpo.ops.init.command",
        "a folder to train from: your own script, launcher files, cluster templates",
    ),
    "launch": (
        "grpo.ops.launch.command",
        "the same line on every node: accelerate or torchrun with everything filled in",
    ),
    "plan": ("grpo.ops.plan.command", "what will go where, and does it fit: no GPU needed"),
    "doctor": ("grpo.ops.doctor.command", "is this machine, or this cluster, able to run it"),
    "eval": ("grpo.ops.evaluate.command", "a checkpoint on its run's evaluation sets, without a trainer"),
    "export": ("grpo.ops.export.command", "a checkpoint as a plain Hugging Face folder"),
    "report": ("grpo.ops.report.command", "a run, or several over each other, as one page that opens from disk"),
    "trace": ("grpo.ops.trace.command", "what happened when on every node, as a file for Perfetto"),
    "reshape": ("grpo.ops.reshape.command", "a checkpoint for another number of training processes"),
    "constraints": ("grpo.ops.constraints.command", "the exact versions that were tested, for `pip install -c`"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 for an error, 2 for an invalid command line."""
    quiet()
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="grpo", description=__doc__)
    parser.add_argument("--version", action="version", version=f"grpo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = parser
    for name, (module, help_line) in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if argv[:1] == [name]:
            importlib.import_module(module).add_arguments(command)
            chosen = command
    _take_both_spellings(chosen)
    args, unknown = parser.parse_known_args(argv)
    if unknown[:1] == ["--"] and "train_flags" in vars(args):  # argparse accepts them only beside other positionals
        args.train_flags, unknown = unknown[1:], []
    if unknown:
        known = [option for action in chosen._actions for option in action.option_strings]
        words = [word + did_you_mean(word.split("=")[0], known) for word in unknown]
        takes_more = {"train_flags", "arguments"} & vars(args).keys()
        behind = "; flags of train.py follow behind ` -- `" if takes_more else ""
        chosen.error(f"unrecognized arguments: {' '.join(words)}{behind}")
    return importlib.import_module(COMMANDS[args.command][0]).run(args)


def _take_both_spellings(parser: argparse.ArgumentParser) -> None:
    """Accept both `--output_dir` and `--output-dir`, as accelerate's commands do; help shows one."""
    for option, action in list(parser._option_string_actions.items()):
        other = option[:2] + option[2:].translate(str.maketrans("-_", "_-"))
        parser._option_string_actions.setdefault(other, action)
