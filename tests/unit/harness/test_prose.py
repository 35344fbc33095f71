"""`tools.prose`: which words count, and what they are held to."""

import sys
from pathlib import Path

import pytest

from tools.prose import bad_start, broken_rates, count, docstrings, main, private_words

CODE = """Text.
```bash
grpo push what that you
```
The option `push that what` <!-- told --> and [a link](conversations.md#what-that), https://example.org/push
"""


def test_count_ignores_code_links_and_comments() -> None:
    counts = count(CODE)
    assert counts.words == 6  # a link keeps its text
    assert counts.of == {"what": 0, "that": 0, "you": 0}
    assert list(private_words(CODE)) == []


def test_count_includes_word_forms() -> None:
    assert count("You see what your run, and that of yours, does yourself.").of == {"what": 1, "that": 1, "you": 4}


def test_private_words_across_lines_are_found() -> None:
    text = "One.\nBatches are sampled\nfar ahead.\nIt was told.\n"
    assert list(private_words(text)) == [(4, "told", "reported"), (2, "sampled far ahead", "asynchronous generation")]


@pytest.mark.parametrize("fine", ["Push the model to the Hub.", "Pushes to the hub", "reserve GPUs", "bedroom"])
def test_private_words_in_field_terms_are_none(fine: str) -> None:
    assert list(private_words(fine)) == []


@pytest.mark.parametrize(
    "word", ["push", "pushes", "proved", "room", "talks", "Conversations", "laid it aside", "respawned"]
)
def test_private_words_include_word_forms(word: str) -> None:
    assert len(list(private_words(f"So is {word} here."))) == 1


def test_broken_rates_are_per_thousand_words() -> None:
    assert list(broken_rates(count("you " + "word " * 99 + "you " + "word " * 99))) == []
    assert list(broken_rates(count("that what " + "word " * 98))) == [
        '"what" 10.0 times in 1,000 words, of at most 2',
        '"that" 10.0 times in 1,000 words, of at most 9',
        '"you" and its forms 0.0 times in 1,000 words, of at least 6',
    ]


def test_prose_check_of_developer_pages_finds_private_words_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("You start it.")
    (tmp_path / "docs" / "architecture.md").write_text("What that what that is.\nA room.")
    (tmp_path / "docs" / "options.md").write_text("What was told.")
    monkeypatch.setattr(sys, "argv", ["prose", "--root", str(tmp_path)])
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[2:] == ['docs/architecture.md:2: "room": write package; space']
    (tmp_path / "docs" / "architecture.md").write_text("What that is.")
    assert main() == 0


MODULE = '''"""A module."""
LIMIT = 3
"""Seconds."""
"%s" % "no docstring"

@documented
class Options:
    """Fields of a run."""
    rate: float
    """Shown by `--help`."""

class Record:
    """A record."""
    name: str
    """A field."""
    def __init__(self):
        """A method."""
        self.rows = []
        """An attribute."""
'''


def test_docstrings_include_modules_classes_functions_and_fields() -> None:
    assert sorted(docstrings(MODULE)) == [
        (1, "A module."),
        (3, "Seconds."),
        (8, "Fields of a run."),
        (13, "A record."),
        (15, "A field."),
        (17, "A method."),
        (19, "An attribute."),
    ]


@pytest.mark.parametrize("text", ["What it is.", "\n    Who waits.", "Whether so.", "Of the last.", "That which is."])
def test_bad_start_of_docstring_is_found(text: str) -> None:
    assert bad_start(text) == text.split()[0]


@pytest.mark.parametrize("text", ["Return what is there.", "Whatever.", "`what`: a name.", "Host of it.", "", "3 ms"])
def test_bad_start_of_verb_noun_or_code_is_none(text: str) -> None:
    assert bad_start(text) is None


def test_prose_check_of_docstrings_pools_rates_over_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("You start it.")
    (tmp_path / "grpo").mkdir()
    (tmp_path / "grpo" / "one.py").write_text(f'"""Says what that is, {"word " * 96}"""\n')
    (tmp_path / "grpo" / "two.py").write_text(f'"""A {"word " * 899}`that that that`"""\nx = "what what what"\n')
    monkeypatch.setattr(sys, "argv", ["prose", "--docstrings", "--root", str(tmp_path)])
    assert main() == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["grpo/one.py", "grpo/two.py", "docstrings"]
    assert rows[-1].split()[1:] == ["1,000", "words", "what", "1.0", "that", "1.0", "you", "0.0"]
    (tmp_path / "grpo" / "two.py").write_text('"""Where it says what, and what."""\n')
    monkeypatch.setattr(sys, "argv", ["prose", "--root", str(tmp_path)])
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        'grpo/two.py:1: a docstring begins with a verb or a noun, not with "Where"',
        'docstrings: "what" 28.3 times in 1,000 words, of at most 2',
        'docstrings: "that" 9.4 times in 1,000 words, of at most 9',
    ]


def test_prose_check_of_docstrings_finds_private_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("You start it.")
    (tmp_path / "grpo" / "faults").mkdir(parents=True)
    (tmp_path / "grpo" / "one.py").write_text('"""Words.\n\nOne in a room, `room` is code."""\nx = "A room."  # told\n')
    (tmp_path / "grpo" / "faults" / "channel.py").write_text('"""Send a proof of the secret,\nand talk."""\n')
    monkeypatch.setattr(sys, "argv", ["prose", "--root", str(tmp_path)])
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[2:] == [
        'grpo/faults/channel.py:2: "talk": write episode; communicate',
        'grpo/one.py:3: "room": write package; space',
    ]


def test_prose_check_of_repository_passes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prose"])
    assert main() == 0, capsys.readouterr().out
