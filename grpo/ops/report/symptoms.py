"""docs/troubleshooting.md by the ids of errors: which of them a text holds, and the page's help for each.

An id, `GRPO-` and three digits, stands in the text of the error and as the heading of its entry; the
words of both are free.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

PAGE = Path(__file__).with_name("troubleshooting.md")  # a link to docs/; the wheel holds the page itself
_HEADING = re.compile(r"^(## .+|### GRPO-\d{3})$", re.MULTILINE)
_IN_TEXT = re.compile(r"\[(GRPO-\d{3})\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One entry of the page."""

    id: str
    section: str
    help: Markup


@cache
def symptoms() -> dict[str, Symptom]:
    """All entries of the page by their ids, in its order."""
    found: dict[str, Symptom] = {}
    section = ""
    _, *parts = _HEADING.split(PAGE.read_text(encoding="utf-8"))
    for heading, text in zip(parts[::2], parts[1::2], strict=True):
        name = heading.lstrip("# ")
        if heading.startswith("## "):
            section = name
        else:
            found[name] = Symptom(id=name, section=section, help=as_html(text))
    return found


def matching(texts: Sequence[str], most: int = 3) -> list[Symptom]:
    """The entries whose ids stand in the texts, in their order there, each once."""
    ids = dict.fromkeys(id for text in texts for id in _IN_TEXT.findall(text))
    return [symptoms()[id] for id in ids if id in symptoms()][:most]


def code(text: str) -> Markup:
    """`such words` as code; all else as it stands."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def as_html(markdown: str) -> Markup:
    """Paragraphs with code, bold words, and links as their text."""
    html = str(code(markdown.strip()))
    html = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html)
    html = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", html)
    return Markup("".join(f"<p>{' '.join(part.split())}</p>" for part in html.split("\n\n") if part.strip()))
