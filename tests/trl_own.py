"""TRL's own tests of its GRPO trainer, with our classes in the place of TRL's: `python -m tests.trl_own CHECKOUT`.

TRL's wheel brings no tests, so CHECKOUT is a clone of its repository, at the version that is installed or near it. The
tests run as they are; what they load from the hub is made under the same names (`tests/support/trl_models.py`).

    theirs: TRL's own classes, in float32 as the others; what fails so, too, is not ours
    ours:   ours, without engines, as TRL's are by default
    local:  ours in local mode, over an engine that answers at once with made-up tokens
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import trl
from trl import import_utils

from grpo import GRPOConfig, GRPOTrainer
from grpo.engine.messages import Sample
from grpo.weights.limits import gap_between
from grpo.weights.report import LogprobGap
from grpo.weights.verifier import Verifier
from tests.support.scripted_trainer import use_scripted_engines
from tests.support.trl_models import OWNER, save_models, save_prompts

MODES = ("theirs", "ours", "local")
TESTS = Path("tests") / "test_grpo_trainer.py"
MADE_UP_TOKENS = 4


class Theirs(trl.GRPOConfig):
    """TRL's; in float32, which a CPU computes faster, and in which small updates change a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"bf16": False, **options})


class WithoutEngines(GRPOConfig):
    """Ours, as TRL's is by default; in float32."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"use_vllm": False, "bf16": False, **options})


class InLocalMode(GRPOConfig):
    """Ours, as it is by default, where a test does not ask for TRL's own ways to vLLM."""

    def __init__(self, **options: Any) -> None:
        mode = {"vllm_mode": "colocate"} if options.get("use_vllm") and "vllm_mode" not in options else {}
        # The engine computes no probabilities, nor what adapters change of them.
        made_up = {"vllm_max_logprob_gap": 1e9, "vllm_lora": "merge", "bf16": False}
        super().__init__(**{**made_up, **mode, **options})


def made_up_tokens(sample: Sample, number: int) -> list[int]:
    """A few letters and signs, in each tokenizer, by the seed."""
    length = min(sample.overrides.get("max_tokens", MADE_UP_TOKENS), MADE_UP_TOKENS)
    rng = np.random.default_rng(sample.seed + number)
    letters = (5, 12) if sample.pictures else (35, 90)  # models that take images have few tokens
    return rng.integers(*letters, rng.integers(1, length + 1)).tolist()  # of lengths that rewards tell apart


def no_gap(verifier: Verifier, engine: Any, expected: np.ndarray) -> LogprobGap:
    """Of an engine that does not know how long an image is."""
    return gap_between(expected.tolist(), expected, has_routers=False)


class Outcomes:
    """A plugin of pytest's: what became of each test.

    Args:
        classes: put into the module of tests, under the names of TRL's.
    """

    def __init__(self, classes: dict[str, type]) -> None:
        self._classes = classes
        self.of: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for module in {item.getparent(pytest.Module) for item in items}:
            assert module is not None
            for name, kind in self._classes.items():
                setattr(module.obj, name, kind)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("::")[2]
        if report.when == "call" or not report.passed:
            self.of[name] = report.outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trl_own", description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a clone of TRL's repository")
    parser.add_argument("--mode", choices=MODES, default="ours")
    parser.add_argument("--outcomes", type=Path, help="a JSON file to write: what became of each test")
    args, others = parser.parse_known_args()
    if not (args.checkout / TESTS).is_file():
        parser.error(f"{args.checkout} has no {TESTS}: give a clone of TRL's repository")
    outcomes_file = None if args.outcomes is None else args.outcomes.absolute()
    with tempfile.TemporaryDirectory(prefix="grpo-trl-") as folder, pytest.MonkeyPatch.context() as patch:
        theirs = Path(folder) / "trl_tests"  # `tests` is ours
        theirs.mkdir()
        for file in (args.checkout / "tests").glob("*.py"):
            if not file.name.startswith("test_") or file.name == TESTS.name:
                shutil.copy(file, theirs)
        save_models(Path(folder) / OWNER)
        save_prompts(Path(folder) / OWNER)
        for name in ("is_joblib_available",):  # of versions near the installed one
            if not hasattr(import_utils, name):
                patch.setattr(import_utils, name, lambda: False, raising=False)
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        classes: dict[str, type] = {"GRPOConfig": Theirs}
        if args.mode != "theirs":
            config = WithoutEngines if args.mode == "ours" else InLocalMode
            classes = {"GRPOTrainer": GRPOTrainer, "GRPOConfig": config}
        if args.mode == "local":
            use_scripted_engines(patch, tokens_of=made_up_tokens)
            patch.setattr(Verifier, "_picture_gap", no_gap)
        outcomes = Outcomes(classes)
        options = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-p", "no:xdist", "-ra"]
        options += ["-o", "markers=slow"]
        code = pytest.main([*options, *others, str(theirs)], plugins=[outcomes])
    if outcomes_file is not None:
        outcomes_file.write_text(json.dumps(outcomes.of, indent=1))
    return code


if __name__ == "__main__":
    sys.exit(main())
