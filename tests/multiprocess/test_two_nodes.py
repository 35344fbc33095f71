"""Two nodes with an engine each: every node for itself, balanced between them, and sampling ahead."""

import itertools
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from grpo import cli
from grpo.faults.failure import FailureRecord
from grpo.ops.report.page import write_report
from grpo.record.timeline.records import BACKWARD, FORWARD, OPTIMIZER, SCORE, START, SYNC, WAIT_GENERATE, read_timelines
from tests.support.contract import CONTRACT_S, STARTUP_S, inner_process, the_record, until_it_ends
from tests.support.finished import JOB_S, MAX_GAP, completions_by_engine, finish_on_policy, lines_of
from tests.support.launching import (
    ROOT,
    Job,
    accelerate_command,
    free_port,
    kill,
    start,
    start_tiny_job,
    tiny_job_script,
)
from tests.support.logs import find, read_log
from tests.support.sockets import Listening, Strangers, documented, listening, where, who
from tests.support.tiny_models import save_tiny_model

STRADDLING = {"per_device_train_batch_size": 6}  # groups of 4: the second one lies on both nodes
STEPS = 6
# Six steps of the rate that others take three of end among weights so large that two orders of adding up differ.
SIX_STEPS = {**STRADDLING, "max_steps": STEPS, "learning_rate": 4e-3}


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
    """Every node samples for itself."""
    out = tmp_path_factory.mktemp("unbalanced")
    job = start_tiny_job(model, out, nodes=2, ranks_per_node=1, config=SIX_STEPS, hold="generation-1")
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
    steps = finish_on_policy(job, STEPS)
    strangers.leave()
    return Unbalanced(job=job, steps=steps, listened=listened, refused=refused, was_obeyed=strangers.marker.exists())


def test_listening_sockets_of_two_nodes_match_docs(unbalanced: Unbalanced) -> None:
    found = set().union(*unbalanced.listened.values())
    assert found == documented()["always"], "\n".join(f"{there}: {who}" for there, who in unbalanced.listened.items())


def test_stranger_pickles_on_sockets_are_not_executed(unbalanced: Unbalanced) -> None:
    """It has made all its steps, with both engines right; see the fixture."""
    assert not unbalanced.was_obeyed
    assert len(unbalanced.listened) > 4
    deaf = {where(there) for there, letters in unbalanced.refused.items() if letters}
    assert deaf <= {"unix, without a file"}, "a sentinel alone throws out who is no rank before he has said anything"


def test_timelines_report_and_trace_of_two_nodes_are_complete(unbalanced: Unbalanced, tmp_path: Path) -> None:
    """On one clock, and whole: the page and the trace miss nothing of it."""
    folder, steps = unbalanced.job.output_dir, unbalanced.steps
    timelines = read_timelines(folder)
    assert [(timeline.node, timeline.unreadable) for timeline in timelines] == [(0, 0), (1, 0)]
    tokens = []
    for node, timeline in enumerate(timelines):
        (attempt,) = timeline.attempts
        assert attempt.ranks == [node]
        assert abs(attempt.clock_offset_s) < 0.5, "both nodes have this machine's clock"
        of_engine = [span for span in timeline.spans if span.lane == "engine 0"]
        assert [(span.requests, span.policy_version) for span in of_engine] == [(6, step) for step in range(STEPS)]
        tokens.append([span.tokens for span in of_engine])
        for span, line in zip(of_engine, steps, strict=True):  # on a busy machine a batch waits to be sent, and longer
            assert line["by_node"]["rollout/tokens_per_s"][node] * (span.end - span.begin) < 1.2 * span.tokens
        phases = {span.phase for span in timeline.spans if span.lane == f"rank {node}"}
        assert phases >= {START, WAIT_GENERATE, SCORE, FORWARD, BACKWARD, OPTIMIZER, SYNC}
        assert {usage.device for usage in timeline.usages} == {"node", f"rank {node}", "engine 0"}
    sampled = [12 * line["completions/mean_length"] for line in steps]
    assert [sum(of_nodes) for of_nodes in zip(*tokens, strict=True)] == pytest.approx(sampled)
    syncs = [[span for span in timeline.spans if span.phase == SYNC] for timeline in timelines]
    for one, other in zip(*syncs, strict=True):
        assert one.begin < other.end, "a weight sync is of all nodes at once"
        assert other.begin < one.end
    assert all(line["rollout/slowest_node"] in (0, 1) for line in steps)
    (run,) = write_report([folder], tmp_path / "report.html")
    assert (run.state, run.num_nodes, run.step, run.missing) == ("finished", 2, STEPS, ())
    assert len((tmp_path / "report.html").read_text()) > 100_000
    assert cli.main(["trace", str(folder), "--out", str(tmp_path / "trace.json")]) == 0
    names = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event["name"] == "process_name"
    }
    assert len(names) == 2


def test_group_split_over_two_nodes_has_four_distinct_samples(unbalanced: Unbalanced) -> None:
    job, steps = unbalanced.job, unbalanced.steps
    samples = [lines_of(job, f"samples-{rank}.jsonl") for rank in (0, 1)]
    for line, first, second in zip(steps, *samples, strict=True):
        assert first["prompts"][4:] == second["prompts"][:2]
        straddling = [tuple(ids) for ids in first["completion_ids"][4:] + second["completion_ids"][:2]]
        assert len(set(straddling)) == 4, f"two samples of one group are the same: {straddling}"
        rewards = [sum(ids) % 7 for ids in first["completion_ids"] + second["completion_ids"]]
        assert line["reward"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    logs = {path.name.removesuffix(".attempt-0.log") for path in (job.output_dir / "logs").iterdir()}
    roles = ("engine-node0-0", "rank-node0-0", "sentinel-node0", "engine-node1-0", "rank-node1-1", "sentinel-node1")
    assert logs == {*roles}


@pytest.fixture(scope="module")
def balanced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """`vllm_balance_nodes` where one node seems to be five times as fast, and engines die.

    That of node 0 in the third generation, that of node 1 in the weight sync after the fourth step, and once more in
    the last generation, when it may not come back.
    """
    out = tmp_path_factory.mktemp("balanced")
    config = {**SIX_STEPS, "vllm_balance_nodes": True, "vllm_max_restarts": 1}
    last = f"generate-{STEPS - 1}"
    strikes = [("update_weights", 4, "inner", 1), ("generate", STEPS - 1, "host", 1)]
    script = tiny_job_script(model, out, config=config, hold="generation-2", strikes=strikes)
    script[0] = str(ROOT / "tests" / "jobs" / "balance_job.py")
    command = accelerate_command(script, nodes=2, ranks_per_node=1, port=free_port())
    job = start(command, out, nodes=2, env={"GRPO_LOG": "debug"})
    try:
        job.wait_for("at-generation-2", STARTUP_S)
        (host,) = job.rank(0)["hosts"]
        inner_process(host).suspend()  # so that it has not answered yet when it dies
        (out / "go-on").touch()
        for rank in (0, 1):
            job.wait_for(f"at-waits-2-{rank}", CONTRACT_S)
        kill(host)  # it samples for the other node, too
        job.wait_for(f"at-struck-{last}", JOB_S)
        until_it_ends(job, CONTRACT_S)
    finally:
        job.end()
    return job


def test_balanced_nodes_after_engine_deaths_return_same_completions(unbalanced: Unbalanced, balanced: Job) -> None:
    job, whole = balanced, STEPS - 1
    for line in job.metrics():
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
    for rank in (0, 1):
        name = f"samples-{rank}.jsonl"
        assert lines_of(job, name) == lines_of(unbalanced.job, name)[:whole]
        # Of 2 and 4 completions, the slow node's requests, the second is sampled by the fast one.
        assert lines_of(job, f"moves-{rank}.jsonl") == [[{"source": 1, "target": 0, "requests": [1]}]] * STEPS
    sent = [completions_by_engine(job, rank)[:whole] for rank in (0, 1)]
    assert sent == [[[10], [10], [20], [10], [10]], [[2]] * whole]  # all of it once more, after the death


def test_engine_deaths_on_two_nodes_restart_and_reissue_requests(balanced: Job) -> None:
    job = balanced
    state = json.loads((job.output_dir / "run_state.json").read_text())
    deaths = [
        ("after step 2: engine 0 of node 0 (", r"phase 'generate' \(engine 0 of node 0 .* signal 9 \[GRPO-406\]\)"),
        ("after step 4: engine 0 of node 1 (", "phase 'sync"),
    ]
    for reported, (begin, why) in zip(state["restarts"], deaths, strict=True):
        assert reported.startswith(begin), reported
        assert re.search(why, reported), reported
        assert reported.endswith("[GRPO-407]"), reported
        engine = reported.partition(": ")[2].partition("(")[0] + "("
        assert job.output().count(engine) == 1, job.fail("not one line about it")
    for line in job.metrics():
        step = line["step"]
        assert line["engine/restarts"] == (step > 2) + (step > 4), line
        assert line["engine/requests_reissued"] == (10 if step == 3 else 0)
        assert line["weight_sync/repeats"] == (step == 5)


def test_engine_death_beyond_max_restarts_ends_job_with_one_record(balanced: Job) -> None:
    """After the last step that is whole has been saved."""
    job = balanced
    says = ["node 1", "rank 1", "phase 'generate'", "[GRPO-408]", "engine 0 of node 1 ", "[GRPO-406]"]
    record = the_record(job, job.output(), says=says, ranks=[0, 1])
    (attempt,) = json.loads((job.output_dir / "run.json").read_text())["attempts"]
    assert attempt["state"] == "failed"
    assert str(FailureRecord(**attempt["failure"])).splitlines()[0] == record
    state = json.loads((job.output_dir / "run_state.json").read_text())  # the trainer is whole
    assert (state["state"], state["step"], state["kind"]) == ("failed", STEPS - 1, "engine")
    assert state["checkpoint"].endswith(f"checkpoint-{STEPS - 1}")
    assert [line["step"] for line in job.metrics()] == [*range(1, STEPS)]


R0, R1, S0, S1, E0 = "rank-node0-0", "rank-node1-1", "sentinel-node0", "sentinel-node1", "engine-node0-0"
EVENTS = {
    R0: [
        r"this is pid \d+ .*; rank 0 of 2, node 0 of 2; .*torch ",
        r"engine 0 of node 0 starts: pid \d+",
        r"training begins after step 0, of 6",
        r"engine 0 of node 0 takes work, after",
        r"weight sync 1 is verified",
        r"weight sync 3 begins: policy version 2",
        r"weight sync 3 ends: policy version 2, \d+ bytes in [\d.]+ s",
        r"generation for step 2 \(train\) begins: 6 prompts",
        r"engine 0 is gone: 10 completions go to others",
        r"an engine died in phase 'generate': engine 0 of node 0 was killed by signal 9",
        r"phase 'engine restart'",
        r"weight sync 4 begins: policy version 2",
        r"this node's generation batch of 10 completions ends",
        r"generation for step 2 ends",
        r"step 3 ends",
        r"weight sync 6 is broken by an engine's death",
        r"checkpoint-5 begins",
        r"checkpoint-5 is complete",
        r"the job failed on node 1 \(.*\), rank 1, phase 'generate'",
    ],
    R1: [
        r"this is pid \d+ .*; rank 1 of 2, node 1 of 2",
        r"weight sync 3 begins: policy version 2",
        r"weight sync 3 ends: policy version 2",
        r"engine 0 of node 0 \(.*\) died in phase 'generate' .* is back after",
        r"weight sync 4 begins: policy version 2",
        r"an engine died in phase 'sync': engine 0 of node 1",
        r"an engine does not come back: died more than 1 times in an hour",
        r"reports: node 1 \(.*\), rank 1, phase 'generate'",
    ],
    S0: [
        r"this is pid \d+ .*; sentinel of ranks \[0\]",
        r"rank 0: phase 'generate'",
        r"rank 0: phase 'engine restart'",
        r"the job failed on node 1 ",
    ],
    S1: [r"has reached the sentinel of node 0", r"rank 1 reports a failure in phase 'generate'"],
    E0: [
        r"this is pid \d+",
        r"builds vLLM's engine for ",
        r"takes work, after",
        r"call \d+ begins: update_weights",
        r"the weight sync is complete: \d+ parameters came",  # of vLLM's own process, forked off
        r"call \d+ ends, after .*: finish_weight_update",
        r"this is pid \d+",  # its successor
        r"takes work, after",
    ],
}
"""What a reader finds in the log of each process, in this order."""
ONE_DEATH = [
    (R0, r"generation for step 2 \(train\) begins"),
    (R0, r"an engine died in phase 'generate'"),
    (R0, r"phase 'engine restart'"),
    (S0, r"rank 0: phase 'engine restart'"),
    (R1, r"engine 0 of node 0 \(.*\) died in phase 'generate' .* is back after"),
    (R1, r"weight sync 4 begins"),
    (R0, r"weight sync 4 ends"),
    (R0, r"generation for step 2 ends"),
]
"""Of both nodes, by the clock."""


def test_logs_of_two_nodes_hold_expected_events_in_order(balanced: Job) -> None:
    assert sum(map(len, EVENTS.values())) >= 25
    logs = {process: read_log(balanced.output_dir, process) for process in EVENTS}
    for process, events in EVENTS.items():
        index = -1
        for event in events:
            index = find(logs[process], event, index)
        assert {line.process.partition("/")[0] for line in logs[process]} == {process}
    begun = find(logs[R0], "an engine died in phase 'generate'")  # the other one by a thread of its own
    assert find(logs[R0], r"engine 0 of node 0 starts: pid \d+", begun) < find(logs[R0], "weight sync 4 begins")
    begin, end = (
        [logs[rank][find(logs[rank], f"weight sync 3 {what}")].time for rank in (R0, R1)] for what in ("begins", "ends")
    )
    assert max(begin) < min(end), "of both nodes at once"
    times = [logs[process][find(logs[process], event)].time for process, event in ONE_DEATH]
    assert times == sorted(times), list(zip(ONE_DEATH, times, strict=True))


def test_log_of_one_step_has_few_records(balanced: Job) -> None:
    for rank in (R0, R1):
        log = read_log(balanced.output_dir, rank)
        at = [find(log, f"step {step} ends") for step in range(1, STEPS)]
        for begin, end in itertools.pairwise(at):
            of_step = log[begin:end]
            assert sum(line.level != "DEBUG" for line in of_step) <= 20, of_step
            assert len(of_step) < 150, "one for a row or a token, perhaps"


@pytest.fixture(scope="module")
def ahead(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Samples ahead, with evaluations in between, until the reward of node 1's rank raises in the sixth step.

    All that while the logs of node 1's rank and sentinel hang: each is a pipe that nobody reads.
    """
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
    (out / "logs").mkdir()
    hanging = [out / "logs" / f"{process}.attempt-0.log" for process in (R1, S1)]
    for path in hanging:
        os.mkfifo(path)
    job = start_tiny_job(tiny_model, out, nodes=2, ranks_per_node=1, config=config, hold="reward-error-5")
    try:
        job.wait_for("ranks/0.json", STARTUP_S)
        until_it_ends(job, JOB_S)
    finally:
        for path in hanging:
            path.unlink()
        job.end()
    return job


def test_log_on_unread_pipe_blocks_no_step(ahead: Job) -> None:
    """And no sentinel: the job has made its steps, and ended in time with one record; see the fixture."""
    assert len(ahead.metrics()) == 5
    assert re.search(r"\[grpo\] \d+ records are missing in \S*rank-node1-1\.attempt-0\.log: ", ahead.output())


def test_lookahead_on_two_nodes_with_evaluations_reports_policy_lag(ahead: Job) -> None:
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


def test_reward_error_on_one_rank_ends_all_ranks(ahead: Job) -> None:
    """And nothing stays, though engines sample for the step after it; see the fixture."""
    record = the_record(ahead, ahead.output(), says=["node 1", "rank 1", "phase 'reward'", "went wrong"])
    raised, stuck = f"[rank0]: grpo.faults.failure.JobFailed: the job failed on {record}", "[grpo] rank 0 ends: "
    assert raised in ahead.output() or f"{stuck}the job failed on {record}" in ahead.output()  # in gloo's own code
    assert "[rank1]: ZeroDivisionError: a reward of the user's went wrong" in ahead.output()
