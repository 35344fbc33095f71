"""How much there is to read: the table of sizes of grpo/, and the bounds that `make lint` holds the code to.

    python -m tools.sizes

Files and functions are counted by `ast`: lines as an editor numbers them, functions from their first decorator to
their last line, inner ones too. Files called `__init__.py` do not count in the figures of files. Core (the trainer)
and wing (the tools around it, `grpo/ops/` and the command line) are counted in code lines, see `tools.code_lines`. A
feature that needs more raises a bound in its own commit, with the reason beside the number. Exits with 1 and the
names when one is broken.
"""

import ast
import graphlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tools import code_lines

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "grpo"
BOUNDED = (PACKAGE, "tests", "bench", "tools")
FILE_LINES = 400
FUNCTION_LINES = 100
ROOT_FILES = 8
MEDIAN_FILE_LINES = 160
P95_FUNCTION_LINES = 40
LARGE_FILE_LINES = 300
WING = (PurePosixPath("grpo/ops"), *(PurePosixPath("grpo", name) for name in ("cli.py", "__main__.py", "train.py")))
"""Tools around the trainer: what a person starts. All else in grpo/ is the core."""
SUBPACKAGES = ("ops/*", "record/timeline", "rollout/agents", "rollout/turns")
"""Folders in folders with a row of their own in the table, below grpo/."""
CODE_LINES = {
    # The trainer; on its way down to 13,300. The log is some 270 of it, table and patches some 450. User code that
    # answers as under TRL took 700 (threads of its own, the main thread, streams), the verification, the guard and the
    # sums of bits 700, samplers of a subclass 130, no padding 110.
    # Faults, second look, 1,150: engines and ranks that are alive and stuck 700, sentinels that come back after a cut
    # 250, prompts of which engines die, figures that are no numbers, time for a cold start.
    # What GPUs need beside them (driver, C compiler, Python.h) 95, a folder that hangs 55.
    # Several batches under way, 650: pause and salt 110, adapters of several weight syncs 160, ages and accounts 120,
    # the engines' log-probabilities under PPO's clip 120, backlog 30, senders and refusals moved into files of their
    # own. Out of memory by phase 75, files and flags that are mixed up 20, versions outside of the tested ranges
    # 35. Which arguments are not at their defaults 10.
    # Text of multimodal and hybrid checkpoints, 210: what takes no part in it, processors, adapters around towers.
    # A dead engine's own error in place of vLLM's word of it, packages that do not fit torch 25.
    # Images, 565: where they are and what does not go with them 90, their way to the engines 140, forward passes 140, a
    # verification that has some 130, towers that travel 65. Four bits below adapters 190.
    # Evaluation with sampling of its own and by sets 155, pass@k 45, its completions 25; libnuma 15.
    # Spare groups 270: the rule and rows that move between ranks 95, their place in TRL's batch 110, options 65; an
    # order of one's own for prompts 40.
    # A door for agents 1,030: server and protocol 400, chains of token ids 150, agents and commands 290, templates that
    # only append 80, their place in TRL's batch and options 110.
    # All buckets of a weight sync in one call 105: pipes beside shared memory 60, the workers end of NCCL 25, deadlines
    # 20. Batches ahead in a checkpoint, also for other numbers of ranks, 140.
    # Completions that have not ended in a checkpoint, and engines that continue them, 190.
    # Episodes, environments, agents and rollout functions that go on while ranks train 315.
    # Nodes with different numbers of ranks and engines 32: what they tell each other, work by engines, shards of a
    # number of ranks that divides no layer. Timeouts handed in 30.
    # One subclass of TRL's trainer in the place of thirteen, 206: what parts see of it 90, the parts by name 41, what
    # each is given and checks; the hooks themselves, each once, are fewer by 136.
    # Rewards of batches that training has not asked for 45. Longer names, so that calls take more lines: 8 (wing: 14).
    "core": 21_471,
    # The sandbox that fails closed, with its filter of system calls, took 130; control groups of both versions 120.
    # Hosts that two attempts blame, or the doctor, 65.
    # Advice on batches under way, together with GPUs to reserve, 30. A plan that refuses what cannot be, with changes
    # that it has tried, a model alone and GPUs by name 250; files for others, both spellings 50; the overview of the
    # report 40, search and filters of its completions, settings that are not the defaults and throughput 45,
    # threads of ranks on CPUs 2. Towers in a plan, kernels of linear attention in the doctor 35.
    # Options of a user's own script that were misspelt, first and last steps that do not overlap, unfit packages 30,
    # an axis of powers of ten 5. Images 155 and four bits 55 in a plan.
    # `grpo eval` 330: a run's sets and settings, engines without a trainer, rewards, the table; sets of train.py 65.
    # Ten tools, what train.py runs, how user errors are shown; templates too. On its way down to 8,600.
    # Agents as a command, and their reward 28. Tasks of reasoning-gym 177: rows, splits, settings, the scorer.
    # Nodes with different numbers of ranks 108: torchrun's line with accelerate's variables 56, ranks of each node in
    # launch and plan 40, in the doctor and the report 12.
    # Errors of users' code behind the first step, keys of a --config, launch options behind the script: 12.
    "wing": 11_123,
    "ops/report": 2_726,  # of it the page: charts, timeline, completions and advice, templates included
}
"""At most so many code lines."""
TOKENS_PER_LINE = {
    # The help of options is no code any more, of which a line was one token; nor are constructors of one name a line.
    "core": 9.2,
    "wing": 9.6,  # the demo's model left as sizes in lines of one number each, and is a file now
}
"""At most so many tokens in a code line of Python, to one decimal: fewer lines are not to come from denser ones."""


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
    code_lines: int
    tokens: int
    """In the code lines."""

    @property
    def module(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The code of one part of the package."""

    lines: int = 0
    """Of Python and of templates."""
    python_lines: int = 0
    tokens: int = 0
    """In the lines of Python."""

    @property
    def tokens_per_line(self) -> float:
        return round(self.tokens / max(1, self.python_lines), 1)

    def __add__(self, other: "Code") -> "Code":
        return Code(
            lines=self.lines + other.lines,
            python_lines=self.python_lines + other.python_lines,
            tokens=self.tokens + other.tokens,
        )


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
    """A Python file."""
    lines, tokens = code_lines.of_python(source)
    return File(
        code_lines=lines,
        tokens=tokens,
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


def parts(path: PurePosixPath) -> set[str]:
    """The parts of the package that a file of it counts in: core or wing, its folder, a subpackage."""
    folder = path.parent.relative_to(PACKAGE)
    of_wing = any(path.is_relative_to(each) for each in WING)
    found = {"wing" if of_wing else "core", folder.parts[0] if folder.parts else "."}
    return found | {
        name
        for name in (PurePosixPath(*folder.parts[:2]).as_posix(),)
        if any(PurePosixPath(name).match(pattern) for pattern in SUBPACKAGES)
    }


def code_of_parts(files: Sequence[File], templates: Mapping[PurePosixPath, int]) -> dict[str, Code]:
    """Code of each part of the package, by name: core and wing first, then folders, each before its subpackages.

    `templates` has the code lines of each file that is not Python.
    """
    single = [
        (file.path, Code(lines=file.code_lines, python_lines=file.code_lines, tokens=file.tokens)) for file in files
    ]
    single += [(path, Code(lines=lines)) for path, lines in templates.items()]
    sums = {"core": Code(), "wing": Code()}
    folders: dict[str, Code] = {}
    for path, code in single:
        for part in parts(path):
            of = sums if part in sums else folders
            of[part] = of.get(part, Code()) + code
    return sums | dict(sorted(folders.items()))


def table(sizes: Sizes, code: Mapping[str, Code]) -> str:
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
    by_part = [["part", "code lines", "tokens per line"], ["---"] * 3]
    by_part += [[name, f"{part.lines:,}", f"{part.tokens_per_line:.1f}"] for name, part in code.items()]
    return "\n\n".join("\n".join(f"| {' | '.join(row)} |" for row in rows) for rows in (of_sizes, by_part))


def broken_code(code: Mapping[str, Code]) -> list[str]:
    """One line for each bound on code that does not hold."""
    found = [
        f"{name} has {code[name].lines:,} code lines, of at most {bound:,}"
        for name, bound in CODE_LINES.items()
        if name in code and code[name].lines > bound
    ]
    return found + [
        f"{name} has {code[name].tokens_per_line} tokens in a code line, of at most {bound}"
        for name, bound in TOKENS_PER_LINE.items()
        if code[name].tokens_per_line > bound
    ]


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
    templates = {
        PurePosixPath(path.relative_to(ROOT)): code_lines.of_template(path.suffix, path.read_text())
        for path in sorted((ROOT / PACKAGE).rglob("*"))
        if path.suffix in code_lines.COMMENTS
    }
    sizes, code = measure(package), code_of_parts(package, templates)
    print(table(sizes, code))
    found = broken(files, sizes) + broken_code(code)
    print("", *found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
