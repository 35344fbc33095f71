"""`vllm_balance_nodes` on two real nodes with real engines, one of which seems to be five times as fast."""

import json
import time
from pathlib import Path

from tests.launching import ROOT, Job, accelerate_command, free_port, kill, start, tiny_job_script, wait_gone

JOB_S = 360
STARTUP_S = 240
CONTRACT_S = 30
MAX_GAP = 1e-3


def start_two_nodes(model: Path, output_dir: Path, *, config: dict, hold: str = "") -> Job:
    script = tiny_job_script(model, output_dir, config=config, hold=hold)
    script[0] = str(ROOT / "tests" / "jobs" / "balance_job.py")
    return start(accelerate_command(script, nodes=2, ranks_per_node=1, port=free_port()), output_dir, nodes=2)


def lines_of(job: Job, name: str) -> list:
    return [json.loads(line) for line in (job.output_dir / "ranks" / name).read_text().splitlines()]


def test_completions_come_back_to_their_rows_and_are_the_same_as_without(tiny_model: Path, tmp_path: Path) -> None:
    """12 rows in groups of 4: the second group lies on both nodes."""
    samples = {}
    for balanced in (True, False):
        config = {"per_device_train_batch_size": 6, "vllm_balance_nodes": balanced}
        job = start_two_nodes(tiny_model, tmp_path / str(balanced), config=config)
        try:
            codes = job.wait(JOB_S)
            assert codes == [0, 0], job.fail(f"launchers exited {codes}")
            assert not job.traces(), job.fail("left something behind")
        finally:
            job.end()
        steps = job.metrics()
        assert [line["step"] for line in steps] == [1, 2, 3], job.fail("not every step was logged")
        for line in steps:
            assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
        samples[balanced] = [lines_of(job, f"samples-{rank}.jsonl") for rank in (0, 1)]
        if balanced:
            # Of 2 and 4 completions, the slow node's requests, the second is sampled by the fast one.
            moves = [[{"source": 1, "target": 0, "requests": [1]}]] * 3
            assert lines_of(job, "moves-0.jsonl") == lines_of(job, "moves-1.jsonl") == moves
            sent = [lines_of(job, f"requests-{rank}.jsonl") for rank in (0, 1)]
            assert sent == [[[10]] * 3, [[2]] * 3]  # completions for each engine
    assert samples[True] == samples[False]


def test_a_dead_engine_on_one_node_ends_both(tiny_model: Path, tmp_path: Path) -> None:
    config = {
        "per_device_train_batch_size": 6,
        "vllm_balance_nodes": True,
        "max_completion_length": 3000,
        "vllm_max_model_length": 3100,
        "generation_kwargs": {"ignore_eos": True},
    }
    job = start_two_nodes(tiny_model, tmp_path / "out", config=config, hold="generate")
    try:
        job.wait_for("at-generate", STARTUP_S)
        time.sleep(1.0)  # well inside the phase
        everyone = job.processes()
        kill(job.rank(0)["hosts"][0])  # it samples for the other node, too
        struck = time.monotonic()
        codes = job.wait(CONTRACT_S)
        left = wait_gone(everyone, max(0.1, CONTRACT_S - (time.monotonic() - struck)))
        assert not left, job.fail(f"left behind: {[(p.pid, p.cmdline()) for p in left]}")
        assert all(code != 0 for code in codes), job.fail(f"launchers exited {codes}")
        assert not job.traces(), job.fail("left something behind")
        output = job.output()
    finally:
        job.end()
    assert lines_of(job, "moves-1.jsonl") == [[{"source": 1, "target": 0, "requests": [1]}]]
    records = {line.partition("the job failed on ")[2] for line in output.splitlines() if "the job failed on" in line}
    assert len(records) == 1, job.fail(f"not one record: {records}")
    (record,) = records
    for part in ("node 0", "generate", "was killed by signal 9"):
        assert part in record, job.fail(f"no {part!r} in {record}")
