"""What DeepSpeed imports, without what takes long."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from grpo.checkpoints.deepspeed_settings import import_deepspeeds_muon


def test_import_deepspeeds_muon_compiles_on_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, deepspeed = pytest.importorskip("torch"), pytest.importorskip("deepspeed")
    compiled = []

    @functools.wraps(torch.compile)
    def compile_now(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled.append(function.__name__)
        return function

    for name in [name for name in sys.modules if name.startswith("deepspeed.runtime.zero.muon")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch, "compile", compile_now)
    import_deepspeeds_muon()
    assert torch.compile is compile_now
    assert not compiled
    muon = deepspeed.runtime.zero.muon.original_muon
    for _ in range(2):
        update = muon.zeropower_via_newtonschulz5(torch.eye(4), 1)
    assert update.shape == (4, 4)
    assert compiled == ["zeropower_via_newtonschulz5"]
