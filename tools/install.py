"""Fill a virtual environment with exactly what a list in constraints/ names: `make install`.

uv does it; where uv cannot be had, pip takes the same list. Neither resolves anything: a list names every package that
is installed, and no other gets in (`tools/constraints.py` makes it). Standard library alone: this runs first.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.pip_settings import for_uv, read_pip_config

CONSTRAINTS = Path("constraints")
LISTS = {"cpu": CONSTRAINTS / "cpu.txt", "cuda": CONSTRAINTS / "cuda.txt"}
UV_PIN = CONSTRAINTS / "uv.txt"
INSTALLED = ".installed"  # in the environment; the Makefile writes the backend into it at the end
# uv knows where PyTorch keeps its CPU builds; asked second, for pip may know of them nearer by.
FROM_PYTORCH = ("--torch-backend", "cpu")
NO_CPU_TORCH = (
    "if it is torch's CPU build that is not found: give pip PyTorch's CPU wheel index, whose address stands on "
    "PyTorch's installation page: PIP_EXTRA_INDEX_URL=ADDRESS make install"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of uv or pip, without its last arguments."""

    name: str
    """`uv` or `pip`."""
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables beside those that are set."""

    def run_first(self, *choices: Sequence[str]) -> None:
        """Runs with the arguments of the first choice that succeeds.

        Raises ValueError with the command and what it said, for each.
        """
        problems = []
        for arguments in choices:
            command = [*self.words, *arguments]
            env = {**os.environ, **self.variables}
            result = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
            if result.returncode == 0:
                return
            problems.append(f"{' '.join(command)}\n{result.stderr}")
        raise ValueError("\n".join(problems))


def make_environment(venv: Path, backend: str) -> str:
    """The interpreter of `venv`, which is made anew where there is none, or one of another Python or backend."""
    config, held = venv / "pyvenv.cfg", venv / INSTALLED
    version = f"version = {sys.version_info[0]}.{sys.version_info[1]}."
    of_this_python = config.exists() and version in config.read_text()
    if not of_this_python or (held.exists() and held.read_text().strip() != backend):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    return str(venv / "bin" / "python")


def pip(python: str) -> Command:
    words = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    return Command(name="pip", words=words)


def uv(python: str, program: str, *subcommand: str, ignored: Collection[str] = ()) -> Command:
    """`uv pip SUBCOMMAND` for `python`, looking where its pip looks, but for the `ignored` options of pip."""
    config = read_pip_config(python)
    settings = for_uv({option: value for option, value in config.items() if option not in ignored})
    words = [program, "pip", *subcommand, "--quiet", "--python", python, *settings.options]
    return Command(name="uv", words=words, variables={"UV_PYTHON_DOWNLOADS": "never", **settings.variables})


def find_uv(python: str) -> str | None:
    """The pinned uv, which pip brings into the environment, or else one on the PATH."""
    try:
        pip(python).run_first(["--requirement", str(UV_PIN)])
    except ValueError:
        return shutil.which("uv")
    return str(Path(python).with_name("uv"))


def choose_installer(python: str, wanted: str) -> Command:
    """Args: wanted: `uv`, `pip`, or `auto` for uv where it can be had."""
    program = None if wanted == "pip" else find_uv(python)
    if program is None and wanted == "uv":
        raise ValueError("uv cannot be had: pip does not find it, and none is on the PATH; INSTALLER=pip does without")
    # Compiled at once, on all cores: each process of the first job would do it else, which doubles its imports.
    return pip(python) if program is None else uv(python, program, "install", "--compile-bytecode")


def fill(installer: Command, backend: str, requirements: Path | None = None) -> None:
    """Install the backend's list, or another one, then this project, editable. Raises ValueError."""
    listed = ["--no-deps", "--requirement", str(requirements or LISTS[backend])]
    elsewhere = [[*listed, *FROM_PYTORCH]] if backend == "cpu" and installer.name == "uv" else []
    try:
        installer.run_first(listed, *elsewhere)
    except ValueError as error:
        raise ValueError(f"{error}\n{NO_CPU_TORCH}" if backend == "cpu" else str(error)) from None
    installer.run_first(["--no-deps", "--no-build-isolation", "--editable", "."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("venv", type=Path)
    parser.add_argument("--backend", choices=LISTS, default="cpu")
    parser.add_argument("--installer", choices=("auto", "uv", "pip"), default="auto")
    args = parser.parse_args()
    began = time.monotonic()
    try:
        python = make_environment(args.venv, args.backend)
        installer = choose_installer(python, args.installer)
        print(f"installing {LISTS[args.backend]} into {args.venv} by {installer.name}: a minute or two ...", flush=True)
        fill(installer, args.backend)
    except (ValueError, subprocess.CalledProcessError) as error:
        sys.exit(f"make install: {error}")
    print(f"installed in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
