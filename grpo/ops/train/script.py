"""Program of `train.py`: TRL's `trl grpo` script with this project's trainer, and the demo task if no model is named.

Flags and YAML files are those of TRL's own script; `GRPOScriptArguments` adds more. Mistakes on the command line are
reported before TRL is imported, as far as possible.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo.ops.mistakes import reporting_mistakes
from grpo.place.files import flag_of, settings_of
from grpo.place.importing import importing


def main(argv: Sequence[str] | None = None) -> None:
    """Train as `argv` says (default: the command line). Called by every rank."""
    argv = sys.argv[1:] if argv is None else argv
    with reporting_mistakes(os.environ.get("GRPO_OUTPUT_DIR") or flag_of(argv, "output_dir")) as reporter:
        settings = settings_of(argv)
        if reporter.output_dir is None and "output_dir" in settings:
            reporter.output_dir = Path(str(settings["output_dir"]))

        with importing():
            from grpo.ops.train.arguments import parse_arguments
            from grpo.ops.train.checks import check_arguments

        arguments = parse_arguments(argv, check=check_arguments)
        reporter.output_dir = Path(arguments.training.output_dir)

        with importing():
            from grpo.ops.train.training import run, run_demo

        trainer = run_demo(arguments) if arguments.is_demo else run(arguments)
        trainer.accelerator.end_training()  # otherwise threads of the process group run into the interpreter's exit
