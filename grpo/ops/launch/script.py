"""What every rank runs under `grpo launch`: the user's script, in the place of `__main__`.

    python -m grpo.ops.launch.script [-m] SCRIPT ARGUMENTS...

What the script fails with before it has a trainer is recorded and reported as the trainer's own failures are.
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
        mute_argparse()  # all read the same command line: one of them says what is wrong with it
    start_host()  # before what takes seconds to import; a script that needs no engine ends it with itself
    from grpo.ops.mistakes import reporting_mistakes

    with reporting_mistakes(os.environ.get("GRPO_OUTPUT_DIR")):
        run_module(name, arguments) if is_module else run_script(Path(name), arguments)


def run_script(path: Path, arguments: Sequence[str]) -> None:
    """As `python PATH ARGUMENTS`: its folder comes first where modules are looked for, its globals stay to the end."""
    module = types.ModuleType("__main__")
    module.__file__ = os.path.abspath(path)  # as the interpreter sets it: the script may change its folder
    module.__dict__["__builtins__"] = __builtins__
    sys.argv = [str(path), *arguments]
    sys.path[0] = str(path.resolve().parent)
    sys.modules["__main__"] = module
    exec(compile(path.read_bytes(), module.__file__, "exec"), module.__dict__)


def run_module(name: str, arguments: Sequence[str]) -> None:
    """As `python -m NAME ARGUMENTS`."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
