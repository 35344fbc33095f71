"""The list of one-line bugs: what of it can be reported without running tests with each of them."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tools import mutants
from tools.mutants import BROKEN, KILLED, SURVIVES, Mutant, copy_of, is_there, judge, missed, read, run_tests, verdict

MUTANT = Mutant(
    id="no-sign",
    file="grpo/loss.py",
    line="return -advantage",
    becomes="return advantage",
    breaks="What is good is learnt.",
    tests=["tests/test_loss.py::test_sign[first-2]", "tests/test_loss.py"],
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout to which `MUTANT` fits."""
    (tmp_path / "grpo").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "grpo" / "loss.py").write_text("def loss(advantage):\n    return -advantage\n")
    (tmp_path / "tests" / "test_loss.py").write_text("def test_sign():\n    pass\n")
    return tmp_path


def test_mutants_check_of_repository_passes(capsys: pytest.CaptureFixture) -> None:
    code = mutants.main(["--check"])
    assert code == 0, capsys.readouterr().out


def test_mutants_list_covers_every_package() -> None:
    root = mutants.ROOT / "grpo"
    packages = {
        path.parent.relative_to(root) for pattern in ("*", "ops/*") for path in root.glob(f"{pattern}/__init__.py")
    }
    known = read(mutants.DATA.read_text()).values()
    lacking = packages - {folder for each in known for folder in Path(each.file).relative_to("grpo").parents}
    assert lacking == set()
    assert sum(each.expected == SURVIVES for each in known) <= 3


def test_applied_to_matching_line_replaces_it() -> None:
    assert MUTANT.applied_to("    return -advantage  # why\n") == "    return advantage  # why\n"


@pytest.mark.parametrize("source", ["", "return -advantage\nreturn -advantage\n"])
def test_applied_to_without_single_match_raises(source: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^no-sign: {source.count('-')} times, and not once, in grpo/loss.py: return"
    ):
        MUTANT.applied_to(source)


def test_problems_name_mismatch_with_checkout(root: Path) -> None:
    assert [*MUTANT.problems(root)] == []
    [no_python] = replace(MUTANT, becomes="return (").problems(root)
    assert no_python.startswith("no-sign: grpo/loss.py would be no Python: ")
    assert [*replace(MUTANT, becomes=MUTANT.line).problems(root)] == [
        "no-sign: it changes one line, and expected is killed or survives"
    ]
    assert [*replace(MUTANT, tests=["tests/test_loss.py::test_size"]).problems(root)] == [
        "no-sign: there is no test tests/test_loss.py::test_size"
    ]
    (root / "grpo" / "loss.py").unlink()
    assert [*MUTANT.problems(root)] == ["no-sign: 0 times, and not once, in grpo/loss.py: return -advantage"]
    assert not is_there(root, "tests/test_other.py")


def test_read_with_duplicate_id_raises() -> None:
    text = '[[mutant]]\nid = "a"\nfile = "f"\nline = "x"\nbecomes = "y"\nbreaks = "."\ntests = []\n'
    assert read(text)["a"].expected == KILLED
    with pytest.raises(ValueError, match="2 mutants have 1 ids"):
        read(text + text)


def test_verdict_of_pytest_exit_codes_matches_table() -> None:
    assert [verdict(code) for code in (0, 1, None)] == [SURVIVES, KILLED, KILLED]
    assert {verdict(code) for code in (2, 3, 4, 5, -9)} == {BROKEN}


def test_missed_names_unexpected_verdicts() -> None:
    known = [MUTANT, replace(MUTANT, id="known", expected=SURVIVES)]
    assert missed(known, {"no-sign": KILLED, "known": SURVIVES}) == []
    assert missed(known, {"no-sign": KILLED, "known": KILLED}) == []
    assert missed(known, {"no-sign": SURVIVES, "known": BROKEN}) == [
        "no-sign: expected killed, found survives: What is good is learnt.",
        "known: expected survives, found BROKEN: What is good is learnt.",
    ]


def test_copy_of_checkout_keeps_links_and_changes_and_is_removed(root: Path) -> None:
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / ".gitignore").write_text("*.log\n")
    (root / "big.log").touch()
    subprocess.run(["git", "-C", str(root), "add", "."], check=True)
    (root / ".gitignore").write_text("*.log\n# and more\n")
    (root / "grpo" / "link").symlink_to("../tests")
    (root / "tests" / "test_loss.py").unlink()
    with copy_of(root) as copy:
        assert (copy / "grpo" / "link").is_symlink()
        assert (copy / ".gitignore").read_text().endswith("# and more\n")
        assert not (copy / "big.log").exists()
        assert not (copy / "tests" / "test_loss.py").exists()
    assert not copy.parent.exists()


def test_judge_applies_and_reverts_each_mutant(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    asks = "from grpo.loss import loss\n\n\ndef test_sign():\n    assert loss(1) == -1\n"
    (root / "tests" / "test_loss.py").write_text(asks)
    (root / "tests" / "test_fails.py").write_text("def test_fails():\n    raise ValueError\n")
    (root / "tests" / "test_idle.py").write_text("def test_idle():\n    pass\n")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    monkeypatch.setattr(mutants, "ROOT", root)
    found = replace(MUTANT, tests=["tests/test_loss.py"])
    others = [
        replace(found, id="unseen", tests=["tests/test_idle.py"]),
        replace(found, id="fails-anyhow", tests=["tests/test_fails.py"]),
        replace(found, id="gone", line="return advantage"),
    ]
    assert judge([found, *others]) == {
        "no-sign": KILLED,
        "unseen": SURVIVES,
        "fails-anyhow": BROKEN,
        "gone": BROKEN,
    }
    said = capsys.readouterr().out
    assert "SURVIVED unseen" in said
    assert "gone: 0 times" in said
    assert "-advantage" in (root / "grpo" / "loss.py").read_text()


def test_run_tests_past_timeout_ends_them(root: Path) -> None:
    hangs = "import time\n\n\ndef test_hangs():\n    time.sleep(600)\n"
    (root / "tests" / "test_loss.py").write_text(hangs)
    copy = root / "grpo"
    assert run_tests(copy, ["../tests/test_loss.py"], 5.0) is None
    assert "KeyboardInterrupt" in (root / "log").read_text()
