"""Renew constraints/cpu.txt and cuda.txt, the lists that `make install` installs: `make constraints`.

uv resolves pyproject.toml for all supported Pythons at once. A version that is listed stays while it still fits; with
`--upgrade` all that pyproject.toml does not pin becomes the newest.
"""

import argparse
import sys
from collections.abc import Sequence

from tools.install import CONSTRAINTS, FROM_PYTORCH, LISTS, Command, find_uv, uv

EXTRAS = {"cpu": ("cpu", "track", "dev", "docs"), "cuda": ("gpu", "track", "dev", "docs")}
ABSENT = {"cpu": CONSTRAINTS / "not_on_cpu.txt"}
OLDEST_PYTHON = "3.11.4"


def compile_arguments(backend: str, *, upgrade: bool) -> list[str]:
    """What `uv pip compile` is to do for one list."""
    arguments = ["pyproject.toml", "--universal", "--python-version", OLDEST_PYTHON, "--annotation-style", "line"]
    arguments += [word for extra in EXTRAS[backend] for word in ("--extra", extra)]
    arguments += ["--custom-compile-command", "make constraints", "--output-file", str(LISTS[backend])]
    if backend in ABSENT:
        arguments += ["--excludes", str(ABSENT[backend])]
    return [*arguments, "--upgrade"] if upgrade else arguments


def renew(compiler: Command, backend: str, *, upgrade: bool) -> None:
    """Write one list. Raises ValueError with what uv said."""
    arguments = compile_arguments(backend, upgrade=upgrade)
    compiler.run_first(arguments, *([[*arguments, *FROM_PYTORCH]] if backend == "cpu" else []))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest of all else")
    upgrade = parser.parse_args(argv).upgrade
    program = find_uv(sys.executable)
    if program is None:
        sys.exit("make constraints: uv cannot be had: pip does not find it, and none is on the PATH")
    try:
        for backend in LISTS:
            # In pip's folder may lie a CPU build of torch, which uv prefers to the index.
            ignored = () if backend == "cpu" else ("find-links",)
            renew(uv(sys.executable, program, "compile", ignored=ignored), backend, upgrade=upgrade)
    except ValueError as error:
        sys.exit(f"make constraints: {error}")


if __name__ == "__main__":
    main()
