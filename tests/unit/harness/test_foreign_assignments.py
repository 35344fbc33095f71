"""`tools.foreign_assignments`: which assignments are to other libraries."""

from pathlib import Path

import pytest

from tools.foreign_assignments import foreign_assignments, main


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load = 1",
        "import torch as t\nt.a.b.load = 1",
        "from vllm.core import Worker\nWorker.main = staticmethod(print)",
        "from vllm.core import Worker\nclass Own:\n    def do(self):\n        Worker.main, x = 1, 2",
        "import torch.distributed as dist\ndefault = dist.group.WORLD\ndefault.bound = None",
        "import deepspeed\nown = deepspeed.ops\nother = own.more\nother.table['x'] = False",
        "import importlib\nchecks = importlib.import_module('trl')\nchecks.is_there = 1",
        "import sys\nsys.modules['trl.generation'].Name = 1",
        "import sys\nsys.modules['trl'] = 1",
        "import torch\nsetattr(torch, 'load', 1)",
        "import torch\ndel torch.load",
        "import torch\ntorch.threads += 1",
        "import torch\nvars(torch)['load'] = 1",
        "import torch\ntorch.__dict__.update({'load': 1})",
        "def patch(kind):\n    kind.__init__ = print",
        "import importlib, trl\nimportlib.reload(trl)",
        "def late():\n    from torch import config\n    config.disable: bool = True",
    ],
)
def test_foreign_assignments_to_library_are_found(source: str) -> None:
    assert [line for line, _ in foreign_assignments(source)] == [len(source.splitlines())]


@pytest.mark.parametrize(
    "source",
    [
        "from grpo.config import GRPOConfig\nGRPOConfig.x = 1",
        "import torch\nlayer = torch.nn.Linear(1, 1)\nlayer.weight = 1",
        "from trl import GRPOTrainer\nclass Own(GRPOTrainer):\n    def go(self):\n        self.model.x = 1",
        "import sys\nsys.excepthook = print\nsys.argv = ['a']\nsys.path[0] = 'b'\nsys.modules['__main__'] = 1",
        "import os\nos.environ['A'] = 'b'\nos.environ |= {}\ndel os.environ['A']",
        "import torch\nload = torch.load\ntorch = 1",
        "from .near import thing\nthing.x = 1",
    ],
)
def test_foreign_assignments_to_own_names_are_none(source: str) -> None:
    assert [*foreign_assignments(source)] == []


def test_foreign_assignments_command_names_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.py").write_text("import torch\n\ntorch.load = None\n")
    monkeypatch.setattr("sys.argv", ["foreign_assignments", str(tmp_path)])
    assert main() == 1
    assert f"{tmp_path}/own.py:3: torch.load" in capsys.readouterr().out


def test_package_has_no_foreign_assignments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["foreign_assignments"])
    assert main() == 0, capsys.readouterr().out
