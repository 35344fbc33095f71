"""An engine's private folder goes with it, whoever still writes into it."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from grpo.engine.lifetime import remove_traces


def test_a_folder_that_is_written_to_meanwhile_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rmtree, late = tmp_path / "engine", shutil.rmtree, []
    folder.mkdir()

    def interrupted(path: Path, **settings: Any) -> None:
        rmtree(path, **settings)
        if len(late) < 2:  # by a process that is about to die
            late.append(path)
            path.mkdir()
            (path / "socket").touch()

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    remove_traces(folder)
    assert len(late) == 2
    assert not folder.exists()
