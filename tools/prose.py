"""Words of README, docs/ and docstrings: rates to keep, words of our own to avoid, first words to avoid.

    python -m tools.prose               the rates of all pages and of all docstrings; exits with 1 for a broken rule
    python -m tools.prose --pages       the rates of each page as well, the worst first
    python -m tools.prose --docstrings  the rates of each file's docstrings as well, the worst first

Code is not prose: code blocks, code spans, link targets and HTML comments do not count, so options, metrics and
messages keep their names. Pages that a tool writes from the code do not count either. Docstrings are those of grpo/:
of modules, classes, functions and fields. Below a field of options stands its `--help`, which is no docstring.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WRITTEN_BY_TOOLS = ("commands.md", "environment.md", "faults.md", "files.md", "options.md", "python_api.md")
FOR_DEVELOPERS = ("architecture.md", "gpu.md", "paths.md", "processes.md")
"""Pages whose readers know the code: no private words, and no rates."""

MOST = {"what": 2.0, "that": 9.0}
LEAST = {"you": 6.0}
"""Per 1,000 words. `you` counts with `your` and `yourself`; docstrings have no least rate of it."""
FORMS = {"yours": "you", "your": "you", "yourself": "you"}

PRIVATE = {
    r"push(?:es|ed|ing)?(?!(?:\s+[\w.-]+){0,6}\s+(?:the\s+)?hub\b)": "weight sync",
    r"prove[sdn]?|proofs?": "verified, verification",
    r"rooms?": "package; space",
    r"told": "reported",
    r"meetings?": "rendezvous",
    r"talk(?:s|ed|ing)?": "episode; communicate",
    r"conversations?": "multi-turn rollout",
    r"respawn(?:s|ed|ing)?": "restart",
    r"(?:lay|lays|laid|set|sets)\s+(?:[\w.]+\s+){0,4}?aside": "quarantine",
    r"reserved\s+(?:GPU|one)s?": "inference GPU",
    r"sampl(?:e|es|ed|ing)\s+(?:[\w.]+\s+){0,3}?ahead": "asynchronous generation",
}
"""A word of our own, and the field's, which docs/architecture.md explains."""

STANDARD = {"grpo/faults/channel.py": ("prove", "proved", "proves", "proof")}
"""Words that are the field's own in a file's docstrings: a handshake proves that both sides know a secret."""

NO_SUBJECT = re.compile(
    r"\s*(how|its?|of|that|they|those|what|when|where|whether|which|who|whom|whose|why)\b", re.IGNORECASE
)
"""First words that are neither a verb nor a noun: no docstring begins with one."""

NOT_PROSE = re.compile(r"^```.*?^```|`[^`]+`|<!--.*?-->|(?<=\])\([^)\s]*\)|https?://[^\s)]+", re.S | re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Words of one or several pages."""

    words: int = 0
    of: Mapping[str, int]
    """How often each word occurs that has a limit."""

    def rate(self, word: str) -> float:
        return 1000 * self.of[word] / self.words if self.words else 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(words=self.words + other.words, of={word: n + other.of[word] for word, n in self.of.items()})


def prose(text: str) -> str:
    """The text without code; each line stays in its place."""
    return NOT_PROSE.sub(lambda found: " " + "\n" * found[0].count("\n"), text)


def count(text: str) -> Counts:
    words = [FORMS.get(word, word) for word in re.findall(r"[a-z]+(?:['-][a-z]+)*", prose(text).lower())]
    return Counts(words=len(words), of={word: words.count(word) for word in (*MOST, *LEAST)})


def private_words(text: str) -> Iterator[tuple[int, str, str]]:
    """Line, word and the field's word for it."""
    plain = prose(text)
    for pattern, instead in PRIVATE.items():
        for found in re.finditer(rf"\b(?:{pattern})\b", plain, re.IGNORECASE):
            yield plain.count("\n", 0, found.start()) + 1, " ".join(found[0].split()), instead


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring in a module's source, fields' included and options' help left out."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        has_help = not isinstance(node, ast.Module) and any(
            isinstance(each, ast.Name) and each.id == "documented" for each in node.decorator_list
        )
        for statement in node.body[:1] if has_help else node.body:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def bad_start(docstring: str) -> str | None:
    """The first word of a docstring that begins with neither a verb nor a noun, else None."""
    found = NO_SUBJECT.match(docstring)
    return found[1] if found else None


def broken_rates(counts: Counts, least_rates: Mapping[str, float] = LEAST) -> Iterator[str]:
    for word, most in MOST.items():
        if counts.rate(word) > most:
            yield f'"{word}" {counts.rate(word):.1f} times in 1,000 words, of at most {most:g}'
    for word, least in least_rates.items():
        if counts.rate(word) < least:
            yield f'"{word}" and its forms {counts.rate(word):.1f} times in 1,000 words, of at least {least:g}'


def row(name: str, counts: Counts) -> str:
    return f"{name:40} {counts.words:6,} words  " + "  ".join(f"{word} {counts.rate(word):4.1f}" for word in counts.of)


def worst_first(counts: Mapping[str, Counts]) -> Iterator[str]:
    """A row for each page or file."""
    by_rate = sorted(counts.items(), key=lambda each: sum(each[1].rate(word) / most for word, most in MOST.items()))
    return (row(*each) for each in reversed(by_rate))


def total(counts: Mapping[str, Counts]) -> Counts:
    return sum(counts.values(), start=Counts(of=dict.fromkeys((*MOST, *LEAST), 0)))


def check_pages(root: Path, *, by_page: bool) -> Iterator[str]:
    """Print the rates of README and docs/; yield each broken rule."""
    pages = [
        page
        for page in (root / "README.md", *sorted((root / "docs").glob("*.md")))
        if page.name not in WRITTEN_BY_TOOLS
    ]
    counts = {page.name: count(page.read_text()) for page in pages if page.name not in FOR_DEVELOPERS}
    if by_page:
        print(*worst_first(counts), sep="\n")
    print(row("pages for users", total(counts)))
    for page in pages:
        for line, word, instead in sorted(private_words(page.read_text())):
            yield f'{page.relative_to(root)}:{line}: "{word}": write {instead}'
    yield from broken_rates(total(counts))


def check_docstrings(root: Path, *, by_file: bool) -> Iterator[str]:
    """Print the rates of the docstrings in grpo/; yield each broken rule."""
    found = {
        str(file.relative_to(root)): sorted(docstrings(file.read_text()))
        for file in sorted((root / "grpo").rglob("*.py"))
    }
    counts = {name: count("\n".join(text for _, text in texts)) for name, texts in found.items()}
    if by_file:
        print(*worst_first(counts), sep="\n")
    print(row("docstrings", total(counts)))
    for name, texts in found.items():
        for line, text in texts:
            if word := bad_start(text):
                yield f'{name}:{line}: a docstring begins with a verb or a noun, not with "{word}"'
            for within, word, instead in sorted(private_words(text)):
                if word not in STANDARD.get(name, ()):
                    yield f'{name}:{line + within - 1}: "{word}": write {instead}'
    yield from (f"docstrings: {each}" for each in broken_rates(total(counts), least_rates={}))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with README.md, docs/ and grpo/")
    parser.add_argument("--pages", action="store_true", help="the rates of each page as well")
    parser.add_argument("--docstrings", action="store_true", help="the rates of each file's docstrings as well")
    options = parser.parse_args()
    found = list(check_pages(options.root, by_page=options.pages))
    found += check_docstrings(options.root, by_file=options.docstrings)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
