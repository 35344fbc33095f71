"""Wrapper of every rank under `grpo launch`: runs the user's script as `__main__`.

    python -m grpo.ops.launch.script [-m] SCRIPT ARGUMENTS...

Failures of the script before it has a trainer are recorded and reported like the trainer's own.
"""

import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from grpo.engine.early import start_host
from grpo.place.launch import read_launch
from grpo.place.patches.stdlib import mute_argparse


def main(argv: Sequence[str]) -> None:
    words = list(argv)
    is_module = words[:1] == ["-m"]
    name, *arguments = words[is_module:]
    if read_launch(os.environ).rank != 0:
        mute_argparse()  # all read the same command line: one of them reports its errors
    start_host()  # before slow imports; a script without engines ends the host with itself
    from grpo.ops.mistakes import reporting_mistakes

    with reporting_mistakes(os.environ.get("GRPO_OUTPUT_DIR")):
        run_module(name, arguments) if is_module else run_script(Path(name), arguments)


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """Run as `python PATH ARGUMENTS`: its folder comes first in the module path, and its globals live to the end."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(path)  # as the interpreter sets it: the script may change its directory
    module.__dict__["__builtins__"] = __builtins__
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), module.__file__, "exec"), module.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """Run as `python -m NAME ARGUMENTS`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
