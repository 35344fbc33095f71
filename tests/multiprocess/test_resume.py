"""A run that is stopped, or killed, and resumed ends where an uninterrupted one does, bit for bit.

With engines: `test_slurm.py`, and signals, deaths and all in `test_engine_restart.py`.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

from grpo import cli
from grpo.checkpoints.checkpoints import read_complete, write_complete
from grpo.rollout.packing import UNFINISHED, Completions, to_lists
from tests.support.launching import start, tiny_job_script
from tests.support.made_up_checkpoints import SAMPLING
from tests.support.resumed_runs import expect, run, seen, steps

ATTEMPTS = 5  # to find a checkpoint that is written amid completions


def state(out: Path) -> dict:
    return json.loads((out / "run_state.json").read_text())


def test_resume_after_stop_matches_uninterrupted_run(tiny_model: Path, tmp_path: Path) -> None:
    config = {"max_steps": 6, "save_strategy": "no"}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expect(run(tiny_model, whole, num_prompts=40, config=config), success=True)
    assert state(whole)["state"] == "finished"
    assert (whole / "final" / "model.safetensors").exists()

    (parts).mkdir()
    (parts / "stop.77.7").touch()
    output = expect(run(tiny_model, parts, num_prompts=40, config=config, signal_at=2), success=True)
    assert "stop.77.7 was left for an earlier attempt" in output
    stopped = state(parts)
    assert (stopped["state"], stopped["step"], stopped["requeue"], stopped["job"]) == ("stopped", 3, True, "77")
    assert stopped["checkpoint"] == str(parts / "checkpoint-3")
    assert not (parts / "final").exists()  # nobody saved a half-trained model
    assert not (parts / "weights").exists()
    assert not list(parts.glob("stop*"))
    with (parts / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 4, "reward": 9.0}\n{"step": 5, "rew')  # as a kill after the checkpoint leaves it

    resume = {**config, "resume_from_checkpoint": "auto"}
    output = expect(run(tiny_model, parts, num_prompts=40, attempt=1, config=resume), success=True)
    assert "goes on after step 3" in output
    assert state(parts)["state"] == "finished"
    assert state(parts)["tracker_run"] == stopped["tracker_run"]
    assert steps(parts) == steps(whole)
    assert '"reward": 9.0' in (parts / "metrics.attempt-0.jsonl").read_text()
    for rank in (0, 1):
        assert seen(parts, rank) == seen(whole, rank)
    assert (parts / "weights").read_text() == (whole / "weights").read_text()

    assert cli.main(["reshape", str(parts / "checkpoint-3"), "--ranks", "1"]) == 0  # others go on from there
    record = read_complete(tmp_path / "parts-ranks-1" / "checkpoint-3")
    assert (record.world_size, record.reshaped_from, record.step) == (1, 2, 3)
    assert record.sampling == {
        **dict.fromkeys(SAMPLING, 1),
        "generation_batch_size": 8,
        "num_generations": 4,
        "seed": 42,
        "spare_groups": 0,
    }


@pytest.mark.long
@pytest.mark.parametrize("ahead", [0, 1])
def test_resume_with_engines_after_stop_or_kill_matches_whole_run(ahead: int, tiny_model: Path, tmp_path: Path) -> None:
    """After a stop, and one batch ahead after a SIGKILL of all ranks at a later step than that of the checkpoint."""
    config = {"max_steps": 6, "save_steps": 3, "use_vllm": True, "check_rewards": False, "generation_lookahead": ahead}
    config |= {"vllm_max_model_length": 64, "vllm_engine_kwargs": {"enforce_eager": True}}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expect(run(tiny_model, whole, num_prompts=40, config=config), success=True)
    if ahead:
        expect(run(tiny_model, parts, num_prompts=40, config=config, kill_at=5), success=False)
        for rank in (0, 1):
            lines = (parts / f"seen-{rank}.jsonl").read_text().splitlines(keepends=True)
            assert len(lines) == 6
            (parts / f"seen-{rank}.jsonl").write_text("".join(lines[:3]))
    else:
        expect(run(tiny_model, parts, num_prompts=40, config=config, signal_at=2), success=True)
        assert state(parts)["step"] == 3
    resume = {**config, "resume_from_checkpoint": "auto"}
    assert "goes on after step 3" in expect(
        run(tiny_model, parts, num_prompts=40, attempt=1, config=resume), success=True
    )
    for rank in (0, 1):
        assert seen(parts, rank) == seen(whole, rank)
    assert [line["reward"] for line in steps(parts).values()] == [line["reward"] for line in steps(whole).values()]
    assert (parts / "weights").read_text() == (whole / "weights").read_text()


def ahead_in(checkpoint: Path, rank: int) -> dict[int, Completions]:
    """Completions of the batches ahead, by their number."""
    batches = torch.load(checkpoint / f"rollout_state_{rank}.pt", weights_only=True)["ahead"]["batches"]
    return {batch["number"]: Completions.from_message(batch["completions"].numpy()) for batch in batches}


@pytest.mark.long
def test_resume_with_lookahead_3_after_sigkill_continues_begun_batches(tiny_model: Path, tmp_path: Path) -> None:
    """What had ended at the last checkpoint is trained on as it was, what had begun goes on behind its first tokens."""
    config = {"max_steps": 8, "save_steps": 3, "use_vllm": True, "check_rewards": False, "generation_lookahead": 3}
    config |= {
        "vllm_max_model_length": 512,
        "max_completion_length": 400,
        "vllm_engine_kwargs": {"enforce_eager": True, "max_num_seqs": 4},  # never done
    }
    config |= {"generation_kwargs": {"min_tokens": 40}}
    for attempt in range(ATTEMPTS):
        out = tmp_path / f"run-{attempt}"
        expect(run(tiny_model, out, num_prompts=40, config=config, kill_at=5), success=False)
        batches = [ahead_in(out / "checkpoint-3", rank) for rank in (0, 1)]
        rows = [
            row
            for of_rank in batches
            for kept in of_rank.values()
            for row in zip(kept.engines, to_lists(kept)[0], strict=True)
        ]
        has_ended = [engine != UNFINISHED for engine, _ in rows]
        if any(has_ended) and any(tokens and not ended for ended, (_, tokens) in zip(has_ended, rows, strict=True)):
            break
    else:
        pytest.fail("no checkpoint was written while some completions had ended and others had not")
    before = [seen(out, rank) for rank in (0, 1)]
    resumed = {**config, "resume_from_checkpoint": "auto"}
    expect(run(tiny_model, out, num_prompts=40, attempt=1, config=resumed), success=True)
    for rank in (0, 1):
        after = {row["step"]: row for row in seen(out, rank)[6:]}
        assert [row["prompts"] for row in after.values()][:3] == [row["prompts"] for row in before[rank][3:]]
        assert [*batches[rank]] == [3, 4, 5]
        for number, kept in batches[rank].items():
            trained = after[number]["completions"]
            for engine, tokens, whole in zip(kept.engines, to_lists(kept)[0], trained, strict=True):
                assert whole[: len(tokens)] == tokens
                assert engine == UNFINISHED or len(whole) == len(tokens)


@pytest.mark.long
def test_resume_in_second_epoch_after_kill_in_save_matches_whole_run(tiny_model: Path, tmp_path: Path) -> None:
    """10 prompts are 5 generation batches, each for two steps: 10 steps an epoch. A kill inside the last save.

    With a reference model that follows the trained one, and is in no checkpoint of transformers. Then a byte of what
    rank 1 has written is flipped, and the checkpoint before it is taken.
    """
    config = {"max_steps": 17, "save_steps": 13, "num_iterations": 2}
    config |= {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expect(run(tiny_model, whole, num_prompts=10, config=config), success=True)
    assert seen(whole, 0)[0]["prompts"] != seen(whole, 0)[5]["prompts"]  # another order in the second epoch
    assert steps(whole)[13]["kl"] != 0

    shutil.copytree(whole / "checkpoint-13", parts / "checkpoint-13")
    for rank in (0, 1):
        (parts / f"seen-{rank}.jsonl").write_text((whole / f"seen-{rank}.jsonl").read_text())
    resume = {**config, "resume_from_checkpoint": "auto"}
    killed = run(tiny_model, parts, num_prompts=10, config=resume, kill_in_save=17)
    expect(killed, success=False)
    assert (parts / "checkpoint-17").exists()
    assert (parts / "checkpoint-13" / "complete.json").exists()

    last = {**resume, "save_total_limit": 1}
    output = expect(run(tiny_model, parts, num_prompts=10, attempt=1, config=last), success=True)
    assert f"passed over: {parts / 'checkpoint-17'} has no complete.json" in output
    assert f"{parts / 'checkpoint-17'} was not finished by an earlier attempt: deleted" in output
    assert "save_total_limit 1: 2 are kept" in output
    assert folders(parts) == {"checkpoint-13", "checkpoint-17"}
    assert state(parts)["checkpoint"] == str(parts / "checkpoint-17")
    assert_same_end(parts, whole)

    (file,) = (parts / "checkpoint-17").glob("global_step17/*zero_pp_rank_1_*_optim_states.pt")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    (parts / "weights").unlink()
    output = expect(run(tiny_model, parts, num_prompts=10, attempt=2, config=last), success=True)
    assert f"WARNING: {file} is not as it was written" in output
    assert f"goes on after step 13, from {parts / 'checkpoint-13'}" in output
    assert folders(parts) == {"checkpoint-13", "checkpoint-17", "damaged-checkpoint-17"}
    assert_same_end(parts, whole)


def folders(out: Path) -> set[str]:
    return {path.name for path in out.glob("*checkpoint-*")}


def assert_same_end(parts: Path, whole: Path) -> None:
    """From step 13 to the end, bit for bit."""
    assert {step: line for step, line in steps(parts).items() if step > 13} == {
        step: line for step, line in steps(whole).items() if step > 13
    }
    assert (parts / "weights").read_text() == (whole / "weights").read_text()
    assert [row for row in seen(parts, 1) if row["step"] >= 14][-2:] == [
        row for row in seen(whole, 1) if row["step"] >= 14
    ]


def test_resume_with_other_rank_count_exits_before_engines_start(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "checkpoint-3"
    folder.mkdir(parents=True)
    write_complete(folder, step=3, world_size=2, sampling={})
    script = tiny_job_script(tiny_model, tmp_path / "out", config={"resume_from_checkpoint": "auto"})
    job = start(lambda _: [sys.executable, *script], tmp_path / "out", env={"GRPO_JOB": "5", "GRPO_ATTEMPT": "3"})
    try:
        assert job.wait(60) == [1], job.fail("was not refused")
    finally:
        job.end()
    assert "this job has 1 [GRPO-706]" in job.output()
    assert f"grpo reshape {folder} --ranks 1" in job.output()
    assert not (tmp_path / "out" / "logs").exists()
    ended = state(tmp_path / "out")
    assert (ended["state"], ended["kind"], ended["job"], ended["attempt"]) == ("failed", "user", "5", 3)
