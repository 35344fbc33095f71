"""Words of README and docs/: rates that pages for users keep, and words of our own that no page uses.

    python -m tools.prose            the rates of all pages together, and each private word; exits with 1 for one
    python -m tools.prose --pages    the rates of each page as well, the worst first

Code is not prose: code blocks, code spans, link targets and HTML comments do not count, so options, metrics and
messages keep their names. Pages that a tool writes from the code do not count either.
"""

import argparse
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
"""In 1,000 words. `you` counts with `your` and `yourself`."""
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


def broken_rates(counts: Counts) -> Iterator[str]:
    for word, most in MOST.items():
        if counts.rate(word) > most:
            yield f'"{word}" {counts.rate(word):.1f} times in 1,000 words, of at most {most:g}'
    for word, least in LEAST.items():
        if counts.rate(word) < least:
            yield f'"{word}" and its forms {counts.rate(word):.1f} times in 1,000 words, of at least {least:g}'


def row(name: str, counts: Counts) -> str:
    return f"{name:24} {counts.words:6,} words  " + "  ".join(f"{word} {counts.rate(word):4.1f}" for word in counts.of)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder with README.md and docs/")
    parser.add_argument("--pages", action="store_true", help="the rates of each page as well")
    options = parser.parse_args()
    pages = [
        page
        for page in (options.root / "README.md", *sorted((options.root / "docs").glob("*.md")))
        if page.name not in WRITTEN_BY_TOOLS
    ]
    by_page = {page.name: count(page.read_text()) for page in pages if page.name not in FOR_DEVELOPERS}
    if options.pages:
        worst = sorted(by_page.items(), key=lambda each: each[1].rate("what") / 2 + each[1].rate("that") / 9)
        print(*(row(*each) for each in reversed(worst)), sep="\n")
    together = sum(by_page.values(), start=Counts(of=dict.fromkeys((*MOST, *LEAST), 0)))
    print(row("pages for users", together))
    found = [
        f'{page.relative_to(options.root)}:{line}: "{word}": write {instead}'
        for page in pages
        for line, word, instead in sorted(private_words(page.read_text()))
    ]
    found += broken_rates(together)
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
