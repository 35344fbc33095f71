"""`tools.prose`: which words count, and what they are held to."""

import sys
from pathlib import Path

import pytest

from tools.prose import broken_rates, count, main, private_words

CODE = """Text.
```bash
grpo push what that you
```
The option `push that what` <!-- told --> and [a link](conversations.md#what-that), https://example.org/push
"""


def test_code_links_and_comments_are_not_prose() -> None:
    counts = count(CODE)
    assert counts.words == 6  # a link keeps its text
    assert counts.of == {"what": 0, "that": 0, "you": 0}
    assert list(private_words(CODE)) == []


def test_a_word_counts_with_its_forms() -> None:
    assert count("You see what your run, and that of yours, does yourself.").of == {"what": 1, "that": 1, "you": 4}


def test_a_private_word_is_found_over_the_end_of_a_line() -> None:
    text = "One.\nBatches are sampled\nfar ahead.\nIt was told.\n"
    assert list(private_words(text)) == [(4, "told", "reported"), (2, "sampled far ahead", "asynchronous generation")]


@pytest.mark.parametrize("fine", ["Push the model to the Hub.", "Pushes to the hub", "reserve GPUs", "bedroom"])
def test_the_fields_own_words_are_fine(fine: str) -> None:
    assert list(private_words(fine)) == []


@pytest.mark.parametrize(
    "word", ["push", "pushes", "proved", "room", "talks", "Conversations", "laid it aside", "respawned"]
)
def test_forms_of_private_words_are_found(word: str) -> None:
    assert len(list(private_words(f"So is {word} here."))) == 1


def test_rates_are_of_a_thousand_words() -> None:
    assert list(broken_rates(count("you " + "word " * 99 + "you " + "word " * 99))) == []
    assert list(broken_rates(count("that what " + "word " * 98))) == [
        '"what" 10.0 times in 1,000 words, of at most 2',
        '"that" 10.0 times in 1,000 words, of at most 9',
        '"you" and its forms 0.0 times in 1,000 words, of at least 6',
    ]


def test_pages_for_developers_have_no_rates_and_no_private_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("You start it.")
    (tmp_path / "docs" / "architecture.md").write_text("What that what that is.\nA room.")
    (tmp_path / "docs" / "options.md").write_text("What was told.")
    monkeypatch.setattr(sys, "argv", ["prose", "--root", str(tmp_path)])
    assert main() == 1
    assert capsys.readouterr().out.splitlines()[1:] == ['docs/architecture.md:2: "room": write package; space']
    (tmp_path / "docs" / "architecture.md").write_text("What that is.")
    assert main() == 0


def test_our_pages_hold(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["prose"])
    assert main() == 0, capsys.readouterr().out
