"""`code_reward` on rows of the real form."""

import json

import pytest

from grpo.ops.train import code_reward as module
from grpo.ops.train.code_reward import code_reward, lines_of
from grpo.ops.train.sandbox import Outcome

ADD = {
    "language": "python",
    "test_cases": [
        {"fn_name": None, "input": "1 2\n", "output": "3\n", "type": "stdin_stdout"},
        {"fn_name": None, "input": "20 22", "output": "42", "type": "stdin_stdout"},
    ],
}
RIGHT = "Add them.\n```python\nprint(sum(map(int, input().split())))\n```\nDone."


def test_code_reward_is_one_only_if_all_cases_pass() -> None:
    texts = {
        RIGHT: 1.0,
        RIGHT.replace("sum", "max"): 0.0,
        "```python\nprint(3)\n```": 0.0,  # right for the first case alone
        f"```python\nnonsense(\n```\n{RIGHT}": 1.0,  # the last block counts
        f"{RIGHT}\n```python\nnonsense(\n```": 0.0,
        "print(3)": 0.0,
        "```cpp\nint main() {}\n```": 0.0,
        "```python\nwhile True: print(input())\n```": 0.0,
    }
    chats = [[{"role": "assistant", "content": text}] for text in texts]
    assert code_reward(chats, [ADD] * len(texts), prompts=chats) == [*texts.values()]
    assert code_reward([*texts], [json.dumps(ADD)] * len(texts)) == [*texts.values()]


def test_code_reward_of_unsupported_rows_is_none() -> None:
    function = {"language": "python", "test_cases": [{"fn_name": "add", "input": "[1, 2]", "output": "3", "type": "x"}]}
    rows = [function, {"language": "python", "test_cases": []}, {**ADD, "language": "rust"}]
    assert code_reward([RIGHT] * 3, rows) == [None, None, None]


@pytest.mark.parametrize("change", [{"input": ["1 2"]}, {"output": ["3"]}, {"input": None}, {"output": 3}])
def test_code_reward_of_non_text_cases_is_none(change: dict) -> None:
    row = {**ADD, "test_cases": [ADD["test_cases"][0], {**ADD["test_cases"][1], **change}]}
    assert code_reward([RIGHT, RIGHT], [row, ADD]) == [None, 1.0]


def test_code_reward_after_sandbox_failure_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([Outcome(code=0, output=b"3"), Outcome(code=None, output=b"", why="OSError: unshare: no more")])
    monkeypatch.setattr(module, "must_isolate", lambda: True)
    monkeypatch.setattr(module, "run_program", lambda *_, **__: next(ends))
    assert code_reward([RIGHT], [ADD]) == [None]


def test_code_reward_beyond_memory_limit_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "must_isolate", lambda: True)
    monkeypatch.setattr(module, "run_program", lambda *_, **__: Outcome(code=None, output=b"3", why="memory"))
    assert code_reward([RIGHT], [ADD]) == [0.0]


def test_code_reward_past_completion_deadline_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRAM_S", 0.0)
    assert code_reward([RIGHT], [ADD]) == [0.0]


def test_lines_of_output_ignore_trailing_whitespace() -> None:
    assert lines_of("1 2 \n3\n\n") == lines_of("1 2\n3") == ["1 2", "3"]
    assert lines_of(" 1") != lines_of("1")
