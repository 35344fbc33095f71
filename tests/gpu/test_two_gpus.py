"""One rank and one engine, each on a GPU of its own."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu.jobs import (
    JOB_S,
    MAX_SAMPLED_BF16,
    benchmark,
    by_accelerate,
    finish,
    largest_gap,
    launch,
    samples,
    save_model,
    tiny_script,
)
from tests.gpu.requirements import rehearsed
from tests.support.launching import ROOT, kill, wait_gone

pytestmark = [pytest.mark.gpus(2), pytest.mark.job, pytest.mark.takes(90)]

Figure = Callable[[str, float, str], None]
DEMO_STEPS = 20
# vLLM 0.31's own words.
COMPILED_ON_CPU = ("CompilationMode.DYNAMO_TRACE_ONCE", "Warming up model for the compilation")
COMPILED_ON_GPU = ("CompilationMode.VLLM_COMPILE", "Graph capturing finished")
DEATH_S = 60  # from the kill to the end of every process


def one_rank(script: list[str]) -> Callable[[int], list[str]]:
    return by_accelerate(script, gpus_per_node=2, reserved=1)


@pytest.mark.takes(180)
def test_demo_in_bf16_finishes_on_policy(tmp_path: Path, figure: Figure) -> None:
    """The first command that a user runs, cut to 20 steps; the engine as users have it, compiled."""

    out = tmp_path / "out"
    flags = ["--output_dir", str(out), "--max_steps", str(DEMO_STEPS), "--logging_steps", "1"]
    job = launch(one_rank([str(ROOT / "train.py"), *flags]), out)
    steps = finish(job, num_steps=DEMO_STEPS)
    assert 0.3 < steps[0]["reward"] < 0.55, job.fail("the demo's model is off")
    figure("largest mean gap of a weight sync", largest_gap(steps), "nats")
    gaps = [line["weight_sync/logprob_gap_mean"] for line in steps if "weight_sync/logprob_gap_mean" in line]
    figure("first weight sync's", gaps[0], "nats")
    figure("largest gap of a token", max(line.get("weight_sync/logprob_gap_max", 0.0) for line in steps), "nats")
    figure("sync", steps[-1]["weight_sync/total_s"], "s")
    figure("launch to first step", steps[0]["startup/launch_to_first_step_s"], "s")
    figure("reward of the first step", steps[0]["reward"], "")
    figure("of the last", steps[-1]["reward"], "")


@pytest.mark.parametrize("backend", ["nccl", "shm"])
def test_job_where_one_gpu_trains_and_one_generates_is_on_policy(backend: str, tmp_path: Path, figure: Figure) -> None:
    model, out = save_model("qwen3-tied", tmp_path / "model"), tmp_path / "out"
    script = tiny_script(model, out, vllm_reserved_gpus=1, vllm_sync_backend=backend)
    steps = finish(launch(one_rank(script), out))
    figure("largest mean gap", largest_gap(steps), "nats")


@pytest.mark.takes(150)
def test_compiled_engine_samples_with_weights_of_each_sync(tmp_path: Path, figure: Figure) -> None:
    """The engine as users have it: compiled, its decoding in CUDA graphs, which were captured before any weight sync.

    A graph that kept old weights would sample with them. The trainer's log-probabilities of what was sampled, by the
    weights of that step, show it: as they do in the last step, before which nothing is synced.
    """
    model, out = save_model("llama-untied", tmp_path / "model"), tmp_path / "out"
    settings = {"max_steps": 5, "learning_rate": 3e-2, "vllm_engine_kwargs": {"enforce_eager": False}}
    script = tiny_script(model, out, hold="stale-4", vllm_reserved_gpus=1, **settings)
    job = launch(one_rank(script), out, env={"VLLM_LOGGING_LEVEL": "INFO"})
    steps = finish(job, num_steps=5, stale=[5])
    engine_log = "".join(log.read_text() for log in (out / "logs").glob("engine-*.log"))
    for said in COMPILED_ON_CPU if rehearsed() else COMPILED_ON_GPU:
        assert said in engine_log, job.fail(f"the engine was not compiled, or not wholly: no {said!r}")
    *synced, stale = [line["sampling/sampling_logp_difference/mean"] for line in steps]
    figure("largest mean difference of sampled tokens", max(synced), "nats")
    figure("with weights of the step before", stale, "nats")
    assert max(synced) < (1e-4 if rehearsed() else MAX_SAMPLED_BF16), job.fail(f"differences: {synced}")
    assert stale > 2 * MAX_SAMPLED_BF16, job.fail(f"weights of the step before show by {stale} nats alone")


@pytest.mark.takes(150)
@pytest.mark.parametrize("backend", ["nccl", "shm"])
def test_lora_job_on_two_gpus_syncs_adapters_alone(backend: str, tmp_path: Path, figure: Figure) -> None:
    """vLLM's kernels for GPUs, in graphs that were captured before any adapter came; the trial is a part of it."""
    model, out = save_model("qwen3-tied", tmp_path / "model"), tmp_path / "out"
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    script = tiny_script(model, out, lora=lora, vllm_reserved_gpus=1, vllm_sync_backend=backend, vllm_engine_kwargs={})
    job = launch(one_rank(script), out)
    steps = finish(job)
    assert "adapters alone" in job.output()
    figure("largest mean gap", largest_gap(steps), "nats")
    figure("synced", steps[-1]["weight_sync/bytes"] / 1e3, "KB")
    figure("sync", steps[-1]["weight_sync/total_s"], "s")


@pytest.mark.takes(270)
def test_model_runner_v2_with_same_seed_repeats_most_completions(tmp_path: Path, figure: Figure) -> None:
    """vLLM takes model runner V2 on GPUs, V1 on CPUs, where everything else was seen. Twice V2, once V1, same seeds.

    Both must pass the proof of every weight sync (prompt log-probabilities, and a prefix cache that was dropped). That
    seeds reach V2 shows in two runs of it; bf16 may turn a token near a tie, and another runner may draw otherwise.
    """
    model = save_model("qwen3-tied", tmp_path / "model")
    drawn = {}
    for name, env in {"V2": {}, "V2 again": {}, "V1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}.items():
        out = tmp_path / name.replace(" ", "-")
        steps = finish(launch(one_rank(tiny_script(model, out, vllm_reserved_gpus=1)), out, env=env))
        drawn[name] = [ids for line in samples(out) if line["step"] == 0 for ids in line["completion_ids"]]
        figure(f"{name}: largest mean gap", largest_gap(steps), "nats")
        figure("of sampled tokens", max(line["sampling/sampling_logp_difference/mean"] for line in steps), "nats")
    again, other = shares_equal(drawn["V2"], drawn["V2 again"]), shares_equal(drawn["V2"], drawn["V1"])
    figure("completions of the first batch that two runs of V2 share", 100 * again, "%")
    figure("V2 and V1 share", 100 * other, "%")
    assert again > 0.5, f"two runs with one seed share {again:.0%} of their completions"


@pytest.mark.takes(200)
def test_resumed_job_on_two_gpus_continues_from_checkpoint(tmp_path: Path) -> None:
    """A checkpoint holds the GPU's random state and ZeRO's shards; the second launch begins with step 3."""
    out = tmp_path / "out"
    flags = [str(ROOT / "train.py"), "--output_dir", str(out), "--logging_steps", "1", "--save_strategy", "steps"]
    flags += ["--save_steps", "2", "--vllm_engine_kwargs", '{"enforce_eager": true}']
    finish(launch(one_rank([*flags, "--max_steps", "2"]), out), num_steps=2)
    steps = finish(launch(one_rank([*flags, "--max_steps", "4", "--resume", "auto"]), out), num_steps=4)
    assert steps[2]["reward"] > 0.2, "what was resumed has not learned what the demo's model knows"


@pytest.mark.takes(60)
def test_doctor_bandwidth_of_two_ranks_over_nccl_reports_rate(tmp_path: Path) -> None:
    flags = ["-m", "grpo.ops.doctor.bandwidth", "--size-mb", "64", "--deadline", "120", "--params-b", "0.5"]
    job = launch(by_accelerate(flags, gpus_per_node=2, reserved=0), tmp_path / "out")
    try:
        assert job.wait(JOB_S) == [0], job.fail("the second stage of the doctor failed")
        assert "GB/s" in job.output(), job.fail("no bandwidth")
    finally:
        job.end()


def shares_equal(one: list[list[int]], other: list[list[int]]) -> float:
    assert len(one) == len(other) > 0
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


@pytest.mark.parametrize("target", ["inner", "host"])
@pytest.mark.parametrize("hold", ["first-sync", "sync"])
def test_engine_killed_in_sync_ends_job_with_one_record(hold: str, target: str, tmp_path: Path, figure: Figure) -> None:
    """The trainer sits in `ncclBroadcast`, the weight sync group's first in the first weight sync, while its abort
    comes from another
    thread: the job, which may not start another one, must still end with the engine's record, and leave nothing."""
    model, out = save_model("qwen3-tied", tmp_path / "model"), tmp_path / "out"
    job = launch(one_rank(tiny_script(model, out, vllm_reserved_gpus=1, vllm_max_restarts=0, hold=hold)), out)
    try:
        job.wait_for(f"at-{hold}", 300)
        time.sleep(1.0)  # the updates are held on their way to the engine; the broadcast waits already
        everyone = job.processes()
        host = job.rank(0)["hosts"][0]
        kill(host if target == "host" else inner_process(host))
        struck = time.monotonic()
        codes = job.wait(DEATH_S)
        left = wait_gone(everyone, max(0.1, DEATH_S - (time.monotonic() - struck)))
        ended_s = time.monotonic() - struck
        assert not left, job.fail(f"left behind: {[(p.pid, p.cmdline()) for p in left]}")
        assert codes != [0], job.fail("a job without its engine ended well")
    finally:
        job.end()
    records = {line.partition("the job failed on ")[2] for line in job.output().splitlines() if "job failed on" in line}
    assert len(records) == 1, job.fail(f"not one record: {records}")
    words = "[GRPO-406]" if target == "host" else "[GRPO-405]"
    for part in ("rank 0", "sync", words):
        assert part in next(iter(records)), job.fail(f"no {part!r} in {records}")
    figure("from the kill to the end", ended_s, "s")


def inner_process(host: int) -> int:
    """vLLM's engine process, a child of the host."""
    import psutil

    children = psutil.Process(host).children()
    return next(child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline()))


@pytest.mark.takes(600)
def test_overlap_benchmark_reports_figures(tmp_path: Path, figure: Figure) -> None:
    benchmark("overlap", tmp_path, figure, gpus=2)
