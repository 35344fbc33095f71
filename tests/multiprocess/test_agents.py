"""Agents on two real ranks with a real engine, which is killed in the middle: what is trained is what the trainer's
own tool loop trains on."""

from pathlib import Path

import numpy as np
import pytest

from examples.calculator_model import ensure_model
from tests.support.contract import inner_process
from tests.support.finished import JOB_S, finish, lines_of
from tests.support.launching import ROOT, Job, accelerate_command, free_port, start


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that has learnt to write calls, most of them right, and not yet to copy what comes back."""
    return ensure_model(tmp_path_factory.mktemp("calculator") / "model", steps=100)


def start_way(way: str, model: Path, out: Path) -> Job:
    script = [str(ROOT / "tests" / "jobs" / "agent_job.py"), way, str(model), str(out)]
    return start(accelerate_command(script, ranks_per_node=2, port=free_port()), out)


def test_agent_after_engine_kill_trains_on_same_rows_as_tool_loop(calculator: Path, tmp_path: Path) -> None:
    """Thirty-two at once on each of two ranks."""
    plain = start_way("tools", calculator, tmp_path / "tools")
    plain_steps = finish(plain)
    struck = start_way("struck", calculator, tmp_path / "struck")
    try:
        struck.wait_for("at-agents", JOB_S)
        (host,) = struck.rank(0)["hosts"]
        inner_process(host).kill()
        (tmp_path / "struck" / "go-on").touch()
    except BaseException:
        struck.end()
        raise
    steps = finish(struck)
    assert steps[-1]["engine/restarts"] == 1
    assert [step["agents/failed"] for step in steps] == [0.0] * 2
    assert [step["reward"] for step in steps] == [step["reward"] for step in plain_steps]
    assert [step["rollout/turns"] for step in steps] == [step["rollout/turns"] for step in plain_steps]
    for step in steps:  # one that is asked for when an error has left no space is no turn
        assert step["agents/requests"] >= step["rollout/turns"]
    assert min(step["rollout/turns"] for step in steps) > 1
    for rank in range(2):
        ours, tools = lines_of(struck, f"trained-{rank}.jsonl"), lines_of(plain, f"trained-{rank}.jsonl")
        assert len(ours) == len(tools) == 2
        for own, other in zip(ours, tools, strict=True):
            logprobs = [np.array(each.pop("sampling_per_token_logps")) for each in (own, other)]
            assert own == other
            np.testing.assert_allclose(*logprobs, atol=1e-4)  # in batches of other sizes the last bits may differ
