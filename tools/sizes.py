"""How much there is to read: the table of sizes of grpo/, and the bounds that `make lint` holds the code to.

    python -m tools.sizes

Everything is counted by `ast`: lines as an editor numbers them, functions from their first decorator to their last
line, inner ones too. Files called `__init__.py` do not count in the figures of files. The total has no bound: features
may come. Exits with 1 and the names when a bound is broken.
"""

import ast
import graphlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "grpo"
BOUNDED = (PACKAGE, "tests", "bench", "tools")
FILE_LINES = 400
FUNCTION_LINES = 100
ROOT_FILES = 8
MEDIAN_FILE_LINES = 160
P95_FUNCTION_LINES = 40
LARGE_FILE_LINES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One Python file."""

    path: PurePosixPath
    """Below the repository's root."""
    lines: int
    functions: tuple[tuple[str, int], ...]
    """Qualified name and lines of each."""
    imports: frozenset[str]
    """As `imported` returns them."""

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A row of the table; all of it is in lines but for the counts."""

    files: int
    lines: int
    median_file: float
    p95_file: float
    median_function: float
    p95_function: float
    max_function: int
    large_files: int
    """Of more than `LARGE_FILE_LINES`."""
    circle: tuple[str, ...]
    """Modules that import each other in a ring, the first one again at the end; empty where there is none."""


def functions(source: str) -> list[tuple[str, int, int]]:
    """Qualified name, first and last line of every function, outer ones before those inside them."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                if not isinstance(child, ast.ClassDef):
                    first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                    yield name, first, child.end_lineno or child.lineno
                yield from walk(child, f"{name}.")
            else:
                yield from walk(child, prefix)

    return list(walk(ast.parse(source), ""))


def imported(source: str) -> frozenset[str]:
    """`a.b` for `import a.b`, `a.b.c` for `from a.b import c`, lazy imports and those for types too."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def read(path: str, source: str) -> File:
    return File(
        path=PurePosixPath(path),
        lines=len(source.splitlines()),
        functions=tuple((name, last - first + 1) for name, first, last in functions(source)),
        imports=imported(source),
    )


def p95(values: Sequence[int]) -> float:
    """The 95th percentile, between two neighbours in proportion."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else max(values, default=0)


def circle(files: Sequence[File]) -> tuple[str, ...]:
    """A ring of imports among `files`; empty where there is none."""
    modules = {file.module for file in files}
    loads: dict[str, set[str]] = {
        file.module: {name if name in modules else name.rpartition(".")[0] for name in file.imports} for file in files
    }
    try:
        graphlib.TopologicalSorter(loads).prepare()
    except graphlib.CycleError as error:
        return tuple(error.args[1])
    return ()


def measure(files: Sequence[File]) -> Sizes:
    named = [file.lines for file in files if file.path.name != "__init__.py"]
    of_functions = [lines for file in files for _, lines in file.functions]
    return Sizes(
        files=len(named),
        lines=sum(named),
        median_file=statistics.median(named or [0]),
        p95_file=p95(named),
        median_function=statistics.median(of_functions or [0]),
        p95_function=p95(of_functions),
        max_function=max(of_functions, default=0),
        large_files=sum(lines > LARGE_FILE_LINES for lines in named),
        circle=circle(files),
    )


def rooms(files: Sequence[File]) -> dict[str, int]:
    """Lines of each folder of the package, the largest first; `.` is its root. With `__init__.py`."""
    lines: dict[str, int] = {}
    for file in files:
        room = file.path.parts[1] if len(file.path.parts) > 2 else "."
        lines[room] = lines.get(room, 0) + file.lines
    return dict(sorted(lines.items(), key=lambda item: -item[1]))


def table(sizes: Sizes, of_rooms: Mapping[str, int]) -> str:
    """Both tables in Markdown."""
    columns = {
        "tree": PACKAGE,
        "files / lines": f"{sizes.files} / {sizes.lines:,}",
        "median file": f"{sizes.median_file:.0f}",
        "p95 file": f"{sizes.p95_file:.0f}",
        "function median / p95 / max": f"{sizes.median_function:.0f} / {sizes.p95_function:.0f} / {sizes.max_function}",
        f"files > {LARGE_FILE_LINES}": f"{sizes.large_files}",
        "circles": " -> ".join(sizes.circle) or "0",
    }
    of_sizes = [[*columns], ["---"] * len(columns), [*columns.values()]]
    by_room = [["room", "lines"], ["---", "---"], *([room, f"{lines:,}"] for room, lines in of_rooms.items())]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in (of_sizes, by_room))


def broken(files: Sequence[File], sizes: Sizes) -> list[str]:
    """One line for each bound that does not hold. `sizes` are the package's, `files` of all bounded folders."""
    found = [
        f"{file.path} has {file.lines} lines, of at most {FILE_LINES}" for file in files if file.lines > FILE_LINES
    ]
    found += [
        f"{file.path} {name} has {lines} lines, of at most {FUNCTION_LINES}"
        for file in files
        for name, lines in file.functions
        if lines > FUNCTION_LINES
    ]
    in_root = sorted(file.path.name for file in files if file.path.parent == PurePosixPath(PACKAGE))
    if len(in_root) > ROOT_FILES:
        found.append(f"{PACKAGE}/ holds {len(in_root)} files, of at most {ROOT_FILES}: {', '.join(in_root)}")
    if sizes.median_file > MEDIAN_FILE_LINES:
        found.append(f"the median file of {PACKAGE}/ has {sizes.median_file:g} lines, of at most {MEDIAN_FILE_LINES}")
    if sizes.p95_function > P95_FUNCTION_LINES:
        found.append(
            f"the 95th percentile of functions in {PACKAGE}/ is {sizes.p95_function:g} lines, "
            f"of at most {P95_FUNCTION_LINES}"
        )
    return found


def main() -> int:
    paths = [path for folder in BOUNDED for path in sorted((ROOT / folder).rglob("*.py"))]
    files = [read(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    package = [file for file in files if file.path.parts[0] == PACKAGE]
    sizes = measure(package)
    print(table(sizes, rooms(package)))
    found = broken(files, sizes)
    print("", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
