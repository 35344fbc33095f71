"""What a checkpoint's pickles may hold: DeepSpeed's records are read, a function is refused before it is called."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from grpo.checkpoints.pickles import check_pickle, load_mapped


class Attribute:
    """Pickles as `getattr` of these."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.getattr, self.arguments


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_load_mapped_reads_members_of_deepspeeds_enumeration(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", {"stages": [*ZeroStageEnum], "weight": torch.ones(2)})
    check_pickle(path)
    assert load_mapped(path)["stages"] == [*ZeroStageEnum]


@pytest.mark.parametrize("content", [Attribute(torch.Tensor, "__init__"), [builtins.getattr]])
def test_check_pickle_with_builtin_function_refuses_it_by_name(content: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", content)
    with pytest.raises(ValueError, match=r"holds builtins\.getattr"):
        check_pickle(path)
    with pytest.raises(ValueError, match=r"holds builtins\.getattr"):
        load_mapped(path)
