"""Two nodes with an engine each: every node for itself, balanced between them, and sampling ahead."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo import cli
from grpo.report.page import write_report
from grpo.timeline.records import BACKWARD, FORWARD, OPTIMIZER, PUSH, SCORE, START, WAIT_GENERATE, read_timelines
from tests.contract import CONTRACT_S, STARTUP_S, inner_process, the_record, until_it_ends
from tests.finished import JOB_S, MAX_GAP, completions_by_engine, finish, finish_on_policy, lines_of
from tests.launching import ROOT, Job, accelerate_command, free_port, kill, start, start_tiny_job, tiny_job_script
from tests.sockets import Listening, Strangers, documented, listening, where, who
from tests.tiny_models import save_tiny_model

STRADDLING = {"per_device_train_batch_size": 6}  # groups of 4: the second one lies on both nodes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama-untied", tmp_path_factory.mktemp("model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbalanced:
    """A job that has ended, and was visited by strangers in its second generation."""

    job: Job
    steps: list[dict]
    """What it logged."""
    listened: dict[Listening, set[tuple[str, str]]]
    """All that it listened on: which of its processes did, and where."""
    refused: dict[Listening, list[str]]
    """What of the strangers' letters was not taken."""
    was_obeyed: bool
    """Whether anybody did what a stranger's pickle said."""


@pytest.fixture(scope="module")
def unbalanced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Unbalanced:
    """Four steps in which every node samples for itself."""
    out = tmp_path_factory.mktemp("unbalanced")
    config = {**STRADDLING, "max_steps": 4}
    job = start_tiny_job(model, out, nodes=2, ranks_per_node=1, config=config, hold="generation-1")
    strangers = Strangers(out / "obeyed")
    try:
        job.wait_for("at-generation-1", STARTUP_S)
        processes = who(job)
        sockets = listening(processes)
        listened = {there: {(processes[pid], where(there)) for pid in there.pids} for there in sockets}
        refused = {there: strangers.visit(there) for there in listened}
    except BaseException:
        job.end()
        raise
    (out / "go-on").touch()
    steps = finish_on_policy(job, 4)
    strangers.leave()
    return Unbalanced(job=job, steps=steps, listened=listened, refused=refused, was_obeyed=strangers.marker.exists())


def test_the_page_says_all_that_listens(unbalanced: Unbalanced) -> None:
    found = set().union(*unbalanced.listened.values())
    assert found == documented()["always"], "\n".join(f"{there}: {who}" for there, who in unbalanced.listened.items())


def test_nobody_obeys_strangers_and_the_job_goes_on(unbalanced: Unbalanced) -> None:
    """It has made all its steps, with both engines right; see the fixture."""
    assert not unbalanced.was_obeyed
    assert len(unbalanced.listened) > 4
    deaf = {where(there) for there, letters in unbalanced.refused.items() if letters}
    assert deaf <= {"unix, without a file"}, "a sentinel alone throws out who is no rank before he has said anything"


def test_what_both_nodes_recorded(unbalanced: Unbalanced, tmp_path: Path) -> None:
    """On one clock, and whole: the page and the trace miss nothing of it."""
    folder, steps = unbalanced.job.output_dir, unbalanced.steps
    timelines = read_timelines(folder)
    assert [(timeline.node, timeline.unreadable) for timeline in timelines] == [(0, 0), (1, 0)]
    for node, timeline in enumerate(timelines):
        (attempt,) = timeline.attempts
        assert attempt.ranks == [node]
        assert abs(attempt.clock_offset_s) < 0.5, "both nodes have this machine's clock"
        of_engine = [span for span in timeline.spans if span.lane == "engine 0"]
        assert [(span.requests, span.policy_version) for span in of_engine] == [(6, step) for step in range(4)]
        for span, line in zip(of_engine, steps, strict=True):
            assert span.tokens == pytest.approx(
                line["by_node"]["rollout/tokens_per_s"][node] * (span.end - span.begin), rel=0.2
            )
        phases = {span.phase for span in timeline.spans if span.lane == f"rank {node}"}
        assert phases >= {START, WAIT_GENERATE, SCORE, FORWARD, BACKWARD, OPTIMIZER, PUSH}
        assert {usage.device for usage in timeline.usages} == {"node", f"rank {node}", "engine 0"}
    pushes = [[span for span in timeline.spans if span.phase == PUSH] for timeline in timelines]
    for one, other in zip(*pushes, strict=True):
        assert one.begin < other.end, "a push is of all nodes at once"
        assert other.begin < one.end
    assert all(line["rollout/slowest_node"] in (0, 1) for line in steps)
    (run,) = write_report([folder], tmp_path / "report.html")
    assert (run.state, run.num_nodes, run.step, run.missing) == ("finished", 2, 4, ())
    assert len((tmp_path / "report.html").read_text()) > 100_000
    assert cli.main(["trace", str(folder), "--out", str(tmp_path / "trace.json")]) == 0
    names = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert len(names) == 2


def test_a_group_straddles_both_nodes(unbalanced: Unbalanced) -> None:
    job, steps = unbalanced.job, unbalanced.steps
    samples = [lines_of(job, f"samples-{rank}.jsonl") for rank in (0, 1)]
    for line, first, second in zip(steps, *samples, strict=True):
        assert first["prompts"][4:] == second["prompts"][:2]
        straddling = [tuple(ids) for ids in first["completion_ids"][4:] + second["completion_ids"][:2]]
        assert len(set(straddling)) == 4, f"two samples of one group are the same: {straddling}"
        rewards = [sum(ids) % 7 for ids in first["completion_ids"] + second["completion_ids"]]
        assert line["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    logs = {path.name for path in (job.output_dir / "logs").iterdir()}
    assert logs == {f"engine-node{node}-0.attempt-0.log" for node in (0, 1)}


@pytest.fixture(scope="module")
def balanced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """`vllm_balance_nodes` where one node seems to be five times as fast; its engine dies in the third generation."""
    out = tmp_path_factory.mktemp("balanced")
    config = {**STRADDLING, "vllm_balance_nodes": True, "max_steps": 4}
    script = tiny_job_script(model, out, config=config, hold="generation-2")
    script[0] = str(ROOT / "tests" / "jobs" / "balance_job.py")
    job = start(accelerate_command(script, nodes=2, ranks_per_node=1, port=free_port()), out, nodes=2)
    try:
        job.wait_for("at-generation-2", STARTUP_S)
        (host,) = job.rank(0)["hosts"]
        inner_process(host).suspend()  # so that it has not answered yet when it dies
        (out / "go-on").touch()
        for rank in (0, 1):
            job.wait_for(f"at-waits-2-{rank}", CONTRACT_S)
        kill(host)  # it samples for the other node, too
    except BaseException:
        job.end()
        raise
    finish(job)
    return job


def test_balanced_completions_come_back_to_their_rows_and_are_the_same_as_without(
    unbalanced: Unbalanced, balanced: Job
) -> None:
    job = balanced
    for line in job.metrics():
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
    for rank in (0, 1):
        name = f"samples-{rank}.jsonl"
        assert lines_of(job, name) == lines_of(unbalanced.job, name)
        assert len(lines_of(job, name)) == 4
        # Of 2 and 4 completions, the slow node's requests, the second is sampled by the fast one.
        assert lines_of(job, f"moves-{rank}.jsonl") == [[{"source": 1, "target": 0, "requests": [1]}]] * 4
    sent = [completions_by_engine(job, rank) for rank in (0, 1)]
    assert sent == [[[10], [10], [20], [10]], [[2]] * 4]  # all of it once more, after the death


def test_an_engine_that_died_on_one_node_holds_up_both_and_comes_back(balanced: Job) -> None:
    job = balanced
    died = "engine 0 of node 0 ("
    assert job.output().count(died) == 1, job.fail("not one line about it")
    (told,) = json.loads((job.output_dir / "run_state.json").read_text())["respawns"]
    assert told.startswith(f"after step 2: {died}"), told
    assert "died in phase 'generate' (engine 0 of node 0 was killed by signal 9)" in told
    for line in job.metrics():
        assert line["engine/respawns"] == (line["step"] > 2), line
        assert line["engine/requests_reissued"] == (10 if line["step"] == 3 else 0)
        assert line["push/repeats"] == 0


@pytest.fixture(scope="module")
def ahead(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Samples ahead, with evaluations in between, until the reward of node 1's rank raises in the sixth step."""
    config = {
        **STRADDLING,
        "generation_lookahead": 1,
        "learning_rate": 0.0,
        "max_steps": 7,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "per_device_eval_batch_size": 4,
        "dataloader_num_workers": 2,
    }
    out = tmp_path_factory.mktemp("ahead")
    job = start_tiny_job(tiny_model, out, nodes=2, ranks_per_node=1, config=config, hold="reward-error-5")
    try:
        job.wait_for("ranks/0.json", STARTUP_S)
        until_it_ends(job, JOB_S)
    finally:
        job.end()
    return job


def test_two_nodes_sample_ahead_with_an_evaluation_in_between(ahead: Job) -> None:
    """With a learning rate of 0 old completions are as likely as new ones: a row at a wrong place would show."""
    job, steps = ahead, ahead.metrics()
    assert [line["rollout/policy_lag"] for line in steps] == [0, 1, 1, 1, 1], job.fail(str(steps))
    assert [line["rollout/policy_lag_steps"] for line in steps] == [0, 1, 1, 1, 1]
    for line in steps:
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
        assert line["sampling/importance_sampling_ratio/clipped_share"] == 0
        assert line["engine/policy_version"] == max(line["step"] - 2, 0)
    for line in steps[1:]:
        assert 0 <= line["rollout/wait_share_max"] <= 1
        assert 0 <= line["engine/idle_share_max"] <= 1
    evaluations = [line for line in map(json.loads, (job.output_dir / "metrics.jsonl").open()) if "eval_reward" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    for line in evaluations:
        assert line["eval_rollout/policy_lag"] == 0


def test_a_reward_that_raises_on_one_rank_raises_everywhere(ahead: Job) -> None:
    """And nothing stays, though engines sample for the step after it; see the fixture."""
    record = the_record(ahead, ahead.output(), says=["node 1", "rank 1", "phase 'reward'", "went wrong"])
    raised, stuck = f"[rank0]: grpo.job.failure.JobFailed: the job failed on {record}", "[grpo] rank 0 ends: "
    assert raised in ahead.output() or f"{stuck}the job failed on {record}" in ahead.output()  # in gloo's own code
    assert "[rank1]: ZeroDivisionError: a reward of the user's went wrong" in ahead.output()
