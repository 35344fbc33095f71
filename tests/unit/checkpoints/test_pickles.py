"""Members of an enumeration as Python before 3.11.4 pickles them, and what looks like it."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.config import ZeroStageEnum

from grpo.checkpoints import pickles
from grpo.checkpoints.pickles import check_pickle, load_mapped


class Got:
    """Pickles as `getattr` of these."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return builtins.getattr, self.arguments


def saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_members_are_read(tmp_path: Path) -> None:
    stages = [Got(ZeroStageEnum, "weights"), ZeroStageEnum.gradients, Got(ZeroStageEnum, "gradients")]
    path = saved(tmp_path / "a.pt", {"stages": stages, "weight": torch.ones(2)})
    check_pickle(path)
    assert load_mapped(path)["stages"] == [ZeroStageEnum.weights, ZeroStageEnum.gradients, ZeroStageEnum.gradients]


@pytest.mark.parametrize(
    "content",
    [
        Got(torch.Tensor, "__init__"),
        Got(ZeroStageEnum, "__class__"),
        [Got(ZeroStageEnum, "weights"), Got(torch.Tensor, "__init__")],
        Got(Got(ZeroStageEnum, "weights"), "__class__"),
        [builtins.getattr],
        [Got(ZeroStageEnum, "weights"), builtins.getattr],
        Got(ZeroStageEnum, "weights", None),
    ],
)
def test_other_attributes_are_refused(content: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.pt", content)
    with pytest.raises(ValueError, match=r"holds builtins\.getattr"):
        check_pickle(path)
    with pytest.raises(ValueError, match=r"holds builtins\.getattr"):
        load_mapped(path)


def test_the_members_are_deepspeeds() -> None:
    assert {*ZeroStageEnum.__members__} == pickles._MEMBERS
