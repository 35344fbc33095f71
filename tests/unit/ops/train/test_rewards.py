import sys
from pathlib import Path

import pytest
import trl.rewards

from grpo.ops.train.rewards import REWARD_NAMES, exact_match, load_reward_funcs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that is not on sys.path, as under a launcher."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_exact_match_of_plain_text_ignores_outer_whitespace():
    assert exact_match(["46", " 46\n", "460", "", "64"], answer=["46"] * 5, prompts=["12+34="] * 5) == [1, 1, 0, 0, 0]


def test_exact_match_of_conversations_scores_content():
    completions = [[{"role": "assistant", "content": " 46"}], [{"role": "assistant", "content": "It is 46"}]]
    assert exact_match(completions, answer=["46", "46"]) == [1.0, 0.0]


def test_exact_match_with_too_few_answers_raises():
    with pytest.raises(ValueError, match="shorter"):
        exact_match(["46", "46"], answer=["46"])


def test_load_reward_funcs_loads_every_name():
    functions = dict(zip(REWARD_NAMES, load_reward_funcs(REWARD_NAMES), strict=True))
    assert functions["exact_match"] is exact_match
    assert functions["accuracy_reward"] is trl.rewards.accuracy_reward
    assert functions["think_format_reward"] is trl.rewards.think_format_reward
    assert functions["get_soft_overlong_punishment"](completion_ids=[[0] * 10, [0] * 2000]) == [0.0, -1]


def test_load_reward_funcs_finds_module_in_working_directory(here: Path):
    (here / "mine_found.py").write_text("def f(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    (function,) = load_reward_funcs(["mine_found.f"])
    assert function(["a", "b"]) == [1.0, 1.0]


def test_load_reward_funcs_with_unknown_name_lists_names():
    with pytest.raises(ValueError, match=r"no reward function 'exact'.*exact_match.*accuracy_reward.*dotted path"):
        load_reward_funcs(["exact"])


@pytest.mark.parametrize("path", ["mine_absent.f", "mine_absent.deeper.f"])
def test_load_reward_funcs_with_missing_module_raises(here: Path, path: str):
    with pytest.raises(ValueError, match=rf"no module 'mine_absent' in {here}.*exact_match"):
        load_reward_funcs([path])


def test_load_reward_funcs_with_missing_function_names_others(here: Path):
    (here / "mine_other.py").write_text("number = 3\ndef right(completions):\n    return []\n")
    with pytest.raises(ValueError, match=r"'wrong' does not exist in .*mine_other.py, which has right"):
        load_reward_funcs(["mine_other.wrong"])
    with pytest.raises(ValueError, match=r"'number' is not callable in .*mine_other.py, which has right"):
        load_reward_funcs(["mine_other.number"])


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("import surely_absent", ModuleNotFoundError, "surely_absent"),
        ("raise RuntimeError('my own words')", RuntimeError, "my own words"),
    ],
)
def test_load_reward_funcs_with_failing_module_raises_its_error(
    here: Path, source: str, error: type[Exception], words: str
):
    (here / f"mine_{error.__name__}.py").write_text(source)
    with pytest.raises(error, match=words):
        load_reward_funcs([f"mine_{error.__name__}.f"])


def test_agent_reward_returns_rewards_of_agent() -> None:
    (reward,) = load_reward_funcs(["agent_reward"])
    assert reward(completions=["a", "b"], reward=[0.5, None]) == [0.5, None]
    with pytest.raises(ValueError, match="none has returned one"):
        reward(completions=["a", "b"])
