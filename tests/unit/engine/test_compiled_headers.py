"""What one engine has compiled, another one finds."""

from pathlib import Path

from grpo.engine.compiled_headers import _link_all


def test_whole_files_that_are_not_there_yet(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    (source / "locks").mkdir(parents=True)
    (source / "a.h.gch").write_text("new")
    (source / "b.h.gch").write_text("new")
    _link_all(source, target)
    assert sorted(path.name for path in target.iterdir()) == ["a.h.gch", "b.h.gch"]
    (target / "a.h.gch").unlink()
    (target / "a.h.gch").write_text("old")
    _link_all(source, target)
    assert (target / "a.h.gch").read_text() == "old"


def test_what_cannot_be_shared_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _link_all(tmp_path / "missing", tmp_path / "target")
    _link_all(tmp_path, tmp_path / "file" / "target")
