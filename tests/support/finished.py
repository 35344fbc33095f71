"""Jobs that have run to their end: what every one of them must show, and what they wrote."""

import json
from collections import Counter, defaultdict

from tests.support.launching import Job

JOB_S = 360
MAX_GAP = 1e-3  # between log-probabilities of engine and trainer, in float32


def lines_of(job: Job, name: str) -> list:
    """A file of lines of JSON in the ranks' folder."""
    return [json.loads(line) for line in (job.output_dir / "ranks" / name).read_text().splitlines()]


def completions_by_engine(job: Job, rank: int) -> list[list[int]]:
    """How many completions each engine of a rank's node was asked for, ascending, by optimizer step."""
    asked: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for line in lines_of(job, f"asked-{rank}.jsonl"):
        asked[line["step"]][line["engine"]] += line["n"]
    return [sorted(of_engine.values()) for _, of_engine in sorted(asked.items())]


def finish(job: Job) -> list[dict]:
    """Wait for success, with nothing left, and end the job in any case. The logged training steps."""
    try:
        codes = job.wait(JOB_S)
        assert codes == [0] * len(codes), job.fail(f"launchers exited {codes}")
        steps = job.metrics()
    finally:
        job.end()
    return steps


def finish_on_policy(job: Job, num_steps: int = 3) -> list[dict]:
    """Of a job in float32 that samples on-policy: engine and trainer computed the same in every step."""
    steps = finish(job)
    assert [line["step"] for line in steps] == [*range(1, num_steps + 1)], job.fail("not every step was logged")
    assert job.output().count("the first weight sync is verified: ") == 1, job.fail("no line says so")
    for line in steps:
        assert line["weight_sync/logprob_gap_limit"] == 1e-4  # a tenth of float32's, once the first gap is known
        assert line["sampling/sampling_logp_difference/max"] < MAX_GAP, job.fail(str(line))
        assert line["sampling/logprob_gap_max"] < MAX_GAP, job.fail(str(line))
        assert line["sampling/gap_alarms"] == 0, job.fail(str(line))
        assert line["weight_sync/logprob_gap_max"] < MAX_GAP, job.fail(str(line))
        assert line["engine/policy_version"] == line["step"] - 1
        for name in ("rollout/generate_s", "rollout/tokens_per_s_min", "weight_sync/send_s", "weight_sync/bytes"):
            assert line[name] > 0, job.fail(f"{name} is missing or 0 in {line}")
    return steps
