"""docs/troubleshooting.md, by symptom: which of its errors a text holds, and what the page says of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

PAGE = Path(__file__).with_name("troubleshooting.md")  # a link to docs/; the wheel holds the page itself
MIN_LITERAL = 12  # characters: less could stand in any text


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One error of the page."""

    section: str
    quote: str
    """The error's text, with `…` for what differs."""
    help: Markup
    """What the page says of it; may be empty, where the error says all."""
    pieces: tuple[str, ...]
    """What does not differ, in its order."""

    @property
    def literal(self) -> int:
        """Characters that do not differ: the more, the better a match."""
        return len("".join(self.pieces).replace(" ", ""))

    def is_in(self, line: str) -> bool:
        """Whether the pieces stand in the line, one behind the other. In time that is linear in its length."""
        at = 0
        for piece in self.pieces:
            at = line.find(piece, at)
            if at < 0:
                return False
            at += len(piece)
        return True


@cache
def symptoms() -> tuple[Symptom, ...]:
    """All of the page, in its order."""
    found = []
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        section, _, text = part.partition("\n")
        blocks = re.split(r"```text\n(.*?)```", text, flags=re.DOTALL)
        for quotes, help in zip(blocks[1::2], blocks[2::2], strict=True):
            paragraphs = help.strip().split("\n\n**")[0]  # a heading of its own begins what belongs to no error
            for quote in quotes.strip().splitlines():
                pieces = tuple(words for piece in quote.split("…") if (words := " ".join(piece.split())))
                found.append(Symptom(section=section, quote=quote, help=as_html(paragraphs), pieces=pieces))
    return tuple(each for each in found if each.literal >= MIN_LITERAL)


def matching(texts: Sequence[str], most: int = 2) -> list[Symptom]:
    """The symptoms that the texts hold, those of the first text first, of each the closest."""
    found: list[Symptom] = []
    for text in texts:
        line = " ".join(text.split())
        here = [each for each in symptoms() if each.is_in(line)]
        found += [each for each in sorted(here, key=lambda each: -each.literal) if each not in found]
    return found[:most]


def code(text: str) -> Markup:
    """`such words` as code; all else as it stands."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def as_html(markdown: str) -> Markup:
    """Paragraphs with code, bold words, and links as their text."""
    html = str(code(markdown.strip()))
    html = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html)
    html = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", html)
    return Markup("".join(f"<p>{' '.join(part.split())}</p>" for part in html.split("\n\n") if part.strip()))
