"""The lowest and the highest versions that pyproject.toml allows: `make test-versions`.

Each is installed into an environment of its own, and runs the unit tests and a job of two nodes there, without a GPU.
That both resolve at all is a unit test.

    python -m tools.versions [lowest] [highest]
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.constraints import compile_list, compiler_for, what_to_resolve
from tools.install import fill, find_uv, make_environment, uv

EDGES = {"lowest": "lowest-direct", "highest": "highest"}
TESTS = (
    ["tests/unit"],
    ["-n0", "tests/multiprocess/test_two_nodes.py::test_group_split_over_two_nodes_has_four_distinct_samples"],
)


def resolve(program: str, backend: str, edge: str, listed: Path) -> None:
    """Write all versions of one edge of `EDGES` into `listed`, for the running Python. `program` is uv.

    Raises ValueError with what uv said.
    """
    arguments = [*what_to_resolve(backend), "--resolution", EDGES[edge], "--no-annotate", "--no-header"]
    compile_list(compiler_for(backend, program), backend, [*arguments, "--output-file", str(listed)])


def run_tests(program: str, edge: str, folder: Path) -> list[str]:
    """The tests that fail with the versions of one edge, as pytest's arguments. Raises ValueError with what uv said."""
    listed, venv = folder / f"{edge}.txt", folder / edge
    resolve(program, "cpu", edge, listed)
    python = make_environment(venv, "cpu")
    fill(uv(python, program, "install", "--compile-bytecode"), "cpu", listed)
    failed = []
    for tests in TESTS:
        print(f"--- {edge}: pytest {' '.join(tests)}", flush=True)
        if subprocess.run([python, "-m", "pytest", "-q", *tests]).returncode != 0:
            failed.append(f"{edge}: pytest {' '.join(tests)}")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("edges", nargs="*", metavar="EDGE", help=f"of {', '.join(EDGES)} (default: all)")
    edges = parser.parse_args().edges or list(EDGES)
    if unknown := set(edges) - EDGES.keys():
        parser.error(f"no edge: {', '.join(sorted(unknown))}; there are {', '.join(EDGES)}")
    program = find_uv(sys.executable)
    if program is None:
        sys.exit("make test-versions: uv cannot be had: pip does not find it, and none is on the PATH")
    failed = []
    for edge in edges:
        with tempfile.TemporaryDirectory(prefix="grpo-versions-") as folder:
            try:
                failed += run_tests(program, edge, Path(folder))
            except (ValueError, subprocess.CalledProcessError) as error:
                failed.append(f"{edge}: {error}")
    sys.exit("\n".join(failed) if failed else 0)


if __name__ == "__main__":
    main()
