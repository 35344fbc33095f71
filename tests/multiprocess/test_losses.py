"""Every loss and every option that it depends on: ours computes what TRL's own trainer computes, bit for bit.

One launch of two ranks for all cases, a table in `tests/support/loss_cases.py`; no engine.
"""

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.support.launching import ROOT, start, torchrun_command
from tests.support.loss_cases import CASES, COMPILED, UNDER_ZERO3
from tests.support.tiny_models import save_tiny_model

JOB = ROOT / "tests" / "jobs" / "losses_job.py"
LIMIT_S = 600  # it takes 45 s alone

pytestmark = pytest.mark.timeout(LIMIT_S + 60)

DIFFERENT = {name for name, case in CASES.items() if case.spoilt}
IN_ONE_JOB = [name for name in CASES if name not in COMPILED]


def run_cases(folder: Path, names: Collection[str], **settings: str) -> list[dict]:
    """What each rank found, by case."""
    folder.mkdir()
    path, model = folder / "settings.json", save_tiny_model("qwen2-tied", folder / "model")
    path.write_text(json.dumps({"model": str(model), "out": str(folder), "cases": [*names], **settings}))
    job = start(
        lambda _: torchrun_command([str(JOB), str(path)]),
        folder,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    try:
        assert job.wait(LIMIT_S) == [0], job.fail("the job did not finish")
    finally:
        job.end()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_cases(tmp_path_factory.mktemp("losses") / "ddp", IN_ONE_JOB)


@pytest.mark.parametrize("name", sorted({*IN_ONE_JOB} - DIFFERENT))
def test_loss_case_matches_trl(name: str, found: list[dict]) -> None:
    for rank, results in enumerate(found):
        assert results[name]["difference"] == "", f"case {name}, rank {rank}"
        assert results[name]["compared"] > 80


@pytest.mark.parametrize("name", sorted(name for name in IN_ONE_JOB if CASES[name].beside is not None))
def test_loss_case_changes_gradients(name: str, found: list[dict]) -> None:
    """Otherwise it would show nothing."""
    beside = CASES[name].beside
    assert found[0][name]["gradients"] != found[0][beside]["gradients"], f"case {name} is as {beside}"


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if case.trims))
def test_loss_with_trimmed_padding_computes_less(name: str, found: list[dict]) -> None:
    for results in found:
        assert results[name]["width"] < 1


@pytest.mark.long
def test_loss_with_torch_compile_matches_trl(tmp_path: Path) -> None:
    plain, compiled = ("plain", *COMPILED)
    for results in run_cases(tmp_path / "compiled", (plain, compiled)):
        assert results[compiled]["difference"] == ""
        assert results[compiled]["compared"] > 80
        assert results[compiled]["gradients"] != results[plain]["gradients"]


def test_loss_under_zero3_matches_trl_and_computes_less(tmp_path: Path) -> None:
    settings = json.loads((ROOT / "configs" / "zero3.json").read_text())
    zero3 = tmp_path / "zero3.json"
    zero3.write_text(json.dumps({**settings, "zero_allow_untested_optimizer": True}))  # torch's SGD
    for results in run_cases(tmp_path / "zero3", UNDER_ZERO3, deepspeed=str(zero3)):
        for name in UNDER_ZERO3:
            assert results[name]["difference"] == "", name
            assert results[name]["width"] < 1


def test_loss_comparison_finds_changed_engine_answers(found: list[dict]) -> None:
    """One token that is another, and log-probabilities of other tokens, are found on either rank, where they begin."""
    assert {
        results["log-probabilities in another order"]["difference"].partition(": differs")[0] for results in found
    } == {"micro-batch 0: sampling_per_token_logps"}
    for results in found:
        assert results["another token"]["difference"].startswith(
            ("micro-batch 0: advantages", "micro-batch 0: completion_ids")
        )
