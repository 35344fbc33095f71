"""Entries of docs/troubleshooting.md by error id: ids found in a text, and the page's help for each.

An id, `GRPO-` and three digits, is in the text of the error and is the heading of its entry. The wording of both may
change.
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
    """Return all entries of the page by id, in its order."""
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
    """Return the entries whose ids appear in the texts, in order of appearance, each once."""
    ids = dict.fromkeys(id for text in texts for id in _IN_TEXT.findall(text))
    return [symptoms()[id] for id in ids if id in symptoms()][:most]


def code(text: str) -> Markup:
    """Convert `such words` to code; escape the rest."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def as_html(markdown: str) -> Markup:
    """Convert paragraphs with code and bold words to HTML; links become their text."""
    html = str(code(markdown.strip()))
    html = re.sub(r"\*\*([^*]+)\*\*", r"<b>\1</b>", html)
    html = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", html)
    return Markup("".join(f"<p>{' '.join(part.split())}</p>" for part in html.split("\n\n") if part.strip()))
