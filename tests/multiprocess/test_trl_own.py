"""TRL's own tests of its GRPO trainer, with our classes in TRL's place: they end as with TRL's."""

import json
import os
import subprocess
import sys

import pytest

VARIABLE = "GRPO_TRL_CHECKOUT"
CHECKOUT = os.environ.get(VARIABLE, "")
LIMIT_S = 3600

pytestmark = [
    pytest.mark.skipif(not CHECKOUT, reason=f"set {VARIABLE} to a clone of TRL's repository: its wheel has no tests"),
    pytest.mark.timeout(3 * LIMIT_S),
]

NOT_IN_LOCAL_MODE = {
    "prefers_rollout_func": "a trainer made of mocks, without arguments to look up a mode in",
    "rollout_func_syncs": "as above",
    "multimodal_response": "tools return text alone in local mode, which refuses images by name",
    "with_tools": "TRL's `generate` is replaced by a fixed text with a tool call; engines here generate",
    "environment_factory": "as above",
    "multiple_environments": "as above",
    "environment_owned": "as above",
    "dataset_required": "refused in words of our own",
    "no_reward_source": "as above",
    "completions_all_masked": "TRL's `generate` is replaced by completions without an end",
    "transformers_continuous_batching": "another generator of transformers' is asked for",
    "train_vllm": "another way to vLLM is asked for, and no GPU is here",
}
"""Parts of names, and why such a test cannot pass in local mode."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What became of each test, by mode."""
    folder = tmp_path_factory.mktemp("trl-own")
    found = {}
    for mode in ("theirs", "ours", "local"):
        file = folder / f"{mode}.json"
        line = [sys.executable, "-m", "tests.trl_own", CHECKOUT, "--mode", mode, "--outcomes", str(file), "-q"]
        with (folder / f"{mode}.log").open("w") as log:
            subprocess.run([*line, "--tb=short"], stdout=log, stderr=log, timeout=LIMIT_S, check=False)
        assert file.exists(), (folder / f"{mode}.log").read_text()[-3000:]
        found[mode] = json.loads(file.read_text())
    return found


def differences(outcomes: dict[str, dict[str, str]], mode: str) -> dict[str, str]:
    """Tests that end otherwise than with TRL's classes."""
    theirs, ours = outcomes["theirs"], outcomes[mode]
    return {
        name: f"{theirs.get(name)} with TRL's, {ours.get(name)} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name)
    }


def test_trl_tests_with_trl_classes_mostly_pass(outcomes: dict[str, dict[str, str]]) -> None:
    assert sum(outcome == "passed" for outcome in outcomes["theirs"].values()) > 100


def test_trl_tests_with_own_classes_match_trl(outcomes: dict[str, dict[str, str]]) -> None:
    assert differences(outcomes, "ours") == {}


def test_trl_tests_in_local_mode_match_trl_except_listed(outcomes: dict[str, dict[str, str]]) -> None:
    found = differences(outcomes, "local")
    assert {name: how for name, how in found.items() if not any(part in name for part in NOT_IN_LOCAL_MODE)} == {}


def test_trl_tests_listed_as_exceptions_fail_in_local_mode(outcomes: dict[str, dict[str, str]]) -> None:
    """Of those that pass with TRL's classes: others say nothing, such as tests of another version or for GPUs."""
    passed = {
        mode: {name for name, outcome in outcomes[mode].items() if outcome == "passed"} for mode in ("theirs", "local")
    }
    for part in NOT_IN_LOCAL_MODE:
        telling = {name for name in passed["theirs"] if part in name}
        assert not telling or telling - passed["local"], part
