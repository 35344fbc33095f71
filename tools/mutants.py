"""Do the tests notice a broken promise? Bugs of one line each, put in one after the other, and what finds them.

    python -m tools.mutants [ID ...]    # all of `mutants.toml`, or these
    python -m tools.mutants --check     # only whether each line and each test is still there

Works in a copy of the checkout, uncommitted changes included, which is gone afterwards. The named tests run on the copy
as it is first: a test that fails anyhow kills nothing. Exits with 1 where a mutant is not found out that was before.
"""

import argparse
import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).with_suffix(".toml")
DEADLINE_S = 300.0  # of one mutant's tests
END_S = 30.0  # from an interrupt, at which pytest ends what its tests have started, to SIGKILL

KILLED, SURVIVES = "killed", "survives"
BROKEN = "BROKEN"  # nothing can be said: its line is not there, or its tests do not pass without it


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A table of `mutants.toml`."""

    id: str
    file: str
    line: str
    """A piece of one line that stands once in the file."""
    becomes: str
    breaks: str
    """The promise that does not hold any more."""
    tests: Sequence[str]
    """As pytest takes them: files, or functions as `file::name`."""
    expected: str = KILLED
    """Or `survives`, of one that no test finds out yet."""

    def applied_to(self, source: str) -> str:
        """Raises ValueError, which names it, where its line does not stand in `source` exactly once."""
        if (count := source.count(self.line)) != 1:
            raise ValueError(f"{self.id}: {count} times, and not once, in {self.file}: {self.line}")
        return source.replace(self.line, self.becomes)

    def problems(self, root: Path) -> Iterator[str]:
        """What of it does not fit the checkout any more."""
        path = root / self.file
        try:
            ast.parse(self.applied_to(path.read_text() if path.is_file() else ""))
        except SyntaxError as error:
            yield f"{self.id}: {self.file} would be no Python: {error}"
        except ValueError as error:
            yield str(error)
        if self.expected not in (KILLED, SURVIVES) or self.line == self.becomes or "\n" in self.line + self.becomes:
            yield f"{self.id}: it changes one line, and expected is {KILLED} or {SURVIVES}"
        yield from (f"{self.id}: there is no test {test}" for test in self.tests if not is_there(root, test))


def is_there(root: Path, test: str) -> bool:
    """Whether the file has the function, if one is named; parameters in brackets are not looked at."""
    name, _, function = test.partition("::")
    if not (root / name).is_file():
        return False
    defined = [each.name for each in ast.parse((root / name).read_text()).body if isinstance(each, ast.FunctionDef)]
    return not function or function.partition("[")[0] in defined


def read(text: str) -> dict[str, Mutant]:
    """By id. Raises ValueError for one that is there twice."""
    mutants = [Mutant(**each) for each in tomllib.loads(text)["mutant"]]
    if len(by_id := {each.id: each for each in mutants}) < len(mutants):
        raise ValueError(f"{len(mutants)} mutants have {len(by_id)} ids")
    return by_id


def verdict(code: int | None) -> str:
    """Of pytest's exit code; None: its tests did not end in time, which is noticed too."""
    return {None: KILLED, 0: SURVIVES, 1: KILLED}.get(code, BROKEN)


def missed(mutants: Sequence[Mutant], verdicts: Mapping[str, str]) -> list[str]:
    """A line for each that is not found out though it was, or of which nothing can be said."""
    worse = [each for each in mutants if verdicts[each.id] not in (KILLED, each.expected)]
    return [f"{each.id}: expected {each.expected}, found {verdicts[each.id]}: {each.breaks}" for each in worse]


@contextlib.contextmanager
def copy_of(root: Path) -> Iterator[Path]:
    """The files that git tracks, or would, as they are now; links stay links. Space for temporary files beside it."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="grpo-mutants-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "copy")
        for name in names:
            if name and os.path.lexists(root / name):  # else it was removed, and git has not been reported
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, copy / name, follow_symlinks=False)
        Path(folder, "tmp").mkdir()
        yield copy


def run_tests(copy: Path, tests: Sequence[str], deadline_s: float) -> int | None:
    """pytest's exit code; None where it was ended at the deadline. Its words are in `log`, beside the copy."""
    env = os.environ | {"PYTHONPATH": str(copy), "TMPDIR": str(copy.parent / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *dict.fromkeys(tests)]
    with (copy.parent / "log").open("w") as log:
        pytest = subprocess.Popen(command, cwd=copy, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            return pytest.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if pytest.poll() is None:
                    pytest.send_signal(signal.SIGINT)
                    pytest.wait(END_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pytest.pid, signal.SIGKILL)
            pytest.wait()


def judge(mutants: Sequence[Mutant]) -> dict[str, str]:
    """The verdict on each, by id; prints a line for it, and why nothing can be said."""
    verdicts: dict[str, str] = {}
    with copy_of(ROOT) as copy:
        tests = [test for each in mutants if not [*each.problems(copy)] for test in each.tests]
        all_pass = bool(tests) and run_tests(copy, tests, DEADLINE_S * len(mutants)) == 0
        for mutant in mutants:
            begun, found, path = time.monotonic(), BROKEN, copy / mutant.file
            why = "\n".join(mutant.problems(copy))
            if not why and (all_pass or run_tests(copy, mutant.tests, DEADLINE_S) == 0):
                before = path.read_text()
                path.write_text(mutant.applied_to(before))
                found = verdict(run_tests(copy, mutant.tests, DEADLINE_S))
                path.write_text(before)
            verdicts[mutant.id] = found
            shown = "SURVIVED" if found == SURVIVES else found
            print(f"{shown:8} {mutant.id:36} {time.monotonic() - begun:5.1f} s", flush=True)
            if found == BROKEN:
                print(why or (copy.parent / "log").read_text()[-2000:], flush=True)
    return verdicts


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("ids", nargs="*", metavar="ID", help="of mutants.toml; none: all of them")
    parser.add_argument("--check", action="store_true", help="run nothing: is each line, and each test, still there?")
    args = parser.parse_args(argv)
    known = read(DATA.read_text())
    if unknown := [each for each in args.ids if each not in known]:
        parser.error(f"there is no mutant {', '.join(unknown)}")
    mutants = [known[each] for each in dict.fromkeys(args.ids) or known]
    if args.check:
        failed = [problem for each in mutants for problem in each.problems(ROOT)]
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and the copy goes
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, by pytest too
        failed = missed(mutants, judge(mutants))
    print("\n".join(failed or [f"{len(mutants)} mutants: all is as expected"]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
