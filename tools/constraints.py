"""Renew constraints/cpu.txt and cuda.txt, the lists that `make install` installs: `make constraints`.

uv resolves pyproject.toml for all supported Pythons at once. A version that is listed stays while it still fits; with
`--upgrade` all becomes the newest that pyproject.toml allows.
"""

import argparse
import sys
from collections.abc import Sequence

from tools.install import CONSTRAINTS, FROM_PYTORCH, LISTS, Command, find_uv, uv

_ALWAYS = ("qlora", "tasks", "track", "dev", "docs")
EXTRAS = {"cpu": ("cpu", *_ALWAYS), "cuda": ("gpu", *_ALWAYS)}
ABSENT = {"cpu": CONSTRAINTS / "not_on_cpu.txt"}
OLDEST_PYTHON = "3.11.4"


def compile_arguments(backend: str, *, upgrade: bool) -> list[str]:
    """What `uv pip compile` is to do for one list."""
    arguments = ["--universal", "--python-version", OLDEST_PYTHON, "--annotation-style", "line"]
    arguments += ["--custom-compile-command", "make constraints", "--output-file", str(LISTS[backend])]
    return [*what_to_resolve(backend), *arguments, *(["--upgrade"] if upgrade else [])]


def what_to_resolve(backend: str) -> list[str]:
    """Arguments for `uv pip compile`: pyproject.toml with all extras of the backend."""
    extras = [word for extra in EXTRAS[backend] for word in ("--extra", extra)]
    absent = ["--excludes", str(ABSENT[backend])] if backend in ABSENT else []
    return ["pyproject.toml", *extras, *absent]


def renew(compiler: Command, backend: str, *, upgrade: bool) -> None:
    """Write one list. Raises ValueError with what uv said."""
    compile_list(compiler, backend, compile_arguments(backend, upgrade=upgrade))


def compile_list(compiler: Command, backend: str, arguments: Sequence[str]) -> None:
    """Raises ValueError with what uv said."""
    compiler.run_first(arguments, *([[*arguments, *FROM_PYTORCH]] if backend == "cpu" else []))


def compiler_for(backend: str, program: str) -> Command:
    """`uv pip compile`, with the uv that is `program`."""
    # In pip's folder may lie a CPU build of torch, which uv prefers to the index.
    return uv(sys.executable, program, "compile", ignored=() if backend == "cpu" else ("find-links",))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest of all else")
    upgrade = parser.parse_args(argv).upgrade
    program = find_uv(sys.executable)
    if program is None:
        sys.exit("make constraints: uv cannot be had: pip does not find it, and none is on the PATH")
    try:
        for backend in LISTS:
            renew(compiler_for(backend, program), backend, upgrade=upgrade)
    except ValueError as error:
        sys.exit(f"make constraints: {error}")


if __name__ == "__main__":
    main()
