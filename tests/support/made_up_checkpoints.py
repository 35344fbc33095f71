"""Folders that look like checkpoints of two ranks."""

from pathlib import Path

from grpo.checkpoints.checkpoints import PARTIAL_FILE, read_rank_records, write_complete, write_rank_record

SAMPLING = {
    "generation_batch_size": 24,
    "num_generations": 4,
    "steps_per_generation": 3,
    "num_iterations": 1,
    "gradient_accumulation_steps": 3,
    "seed": 42,
}
"""The settings of a run with three micro-batches a step."""

FILES = [
    "model.safetensors",
    "trainer_state.json",
    "global_step3/mp_rank_00_model_states.bin",
    "rng_state_0.bin",
    "rollout_state_1.bin",
    "latest",
    "global_step3/zero_pp_rank_0_mp_rank_00_model_states.bin",
    "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.bin",
]


def fill(folder: Path) -> Path:
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"0123456789")
    return folder


def make(output_dir: Path, step: int, *, complete: bool = True, resumable: bool = True) -> Path:
    """`checkpoint-<step>` as two ranks write it; one that is not complete was begun by us."""
    folder = fill(output_dir / f"checkpoint-{step}")
    (folder / PARTIAL_FILE).touch()
    if complete:
        for rank in (0, 1):
            write_rank_record(folder, rank, 2)
        sums, missing = read_rank_records(folder, range(2))
        assert not missing
        write_complete(folder, step=step, world_size=2, sampling={"seed": 42}, resumable=resumable, sums=sums)
    return folder


def names(output_dir: Path) -> set[str]:
    return {path.name for path in output_dir.iterdir()}
