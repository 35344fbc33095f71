"""The estimate of ZeRO-3's states and buffers against the tensors of a real engine, on two ranks."""

import json
from pathlib import Path

import pytest
from transformers import AutoConfig

from grpo.planning.memory_budget import Line
from grpo.planning.model_shape import shape_of
from grpo.planning.zero_memory import Sharding, buffer_lines, read_sharding, states_of
from tests.launching import start, torchrun_command
from tests.tiny_models import tiny_config

JOB = Path(__file__).resolve().parents[1] / "jobs" / "zero_memory_job.py"
RANKS = 2
DEFAULTS = ("reduce_bucket_size", "param_persistence_threshold", "max_live_parameters", "sub_group_size")
ZERO = {
    "stage": 3,
    "reduce_bucket_size": 3_000_000,  # about as large as the states, so that neither hides the other
    "stage3_param_persistence_threshold": 40_000,  # keeps norms, biases and key-value projections whole
}


@pytest.mark.parametrize(
    ("dtype", "offload"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "cpu")], ids=str
)
def test_states_and_buffers_are_what_a_real_engine_holds(dtype: str, offload: str, tmp_path: Path) -> None:
    zero = {**ZERO, "offload_optimizer": {"device": offload}}
    config = tiny_config("qwen2-tied")
    config.update({"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 9001})
    config.save_pretrained(tmp_path)
    settings = tmp_path / "deepspeed.json"
    settings.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "zero_optimization": zero,
                "bf16": {"enabled": dtype == "bfloat16"},
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,  # its own Adam has to be compiled; the states are the same
                "compare_defaults": DEFAULTS,
            }
        )
    )
    job = start(
        lambda _: torchrun_command([str(JOB), str(tmp_path), str(settings), str(tmp_path)], ranks=RANKS),
        tmp_path / "out",
        env={"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
    )
    try:
        assert job.wait(300) == [0], job.fail("the engine did not finish its step")
        measured = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    finally:
        job.end()

    shape = shape_of(AutoConfig.from_pretrained(tmp_path), "tiny")
    assert shape.num_parameters > 4_000_000
    sharding = read_sharding(zero, hidden_size=256)
    dtype_bytes = {"float32": 4, "bfloat16": 2}[dtype]
    states = states_of(shape, sharding, world_size=RANKS, dtype_bytes=dtype_bytes)
    lines: list[Line] = buffer_lines(shape, sharding, dtype_bytes=dtype_bytes)
    estimated = {"states": states.device_bytes + states.host_bytes, **{line.key: line.num_bytes for line in lines}}
    assert estimated.keys() == {"states", "reduce_bucket", "persistent"}
    estimated["everything"] = sum(estimated.values())
    for held in measured:
        for name, value in estimated.items():
            print(f"{dtype}, offload {offload}: {name} {value} B, held {held[name]} B, {value / held[name] - 1:+.2%}")
            assert value == pytest.approx(held[name], rel=0.02), name

    defaults = Sharding(stage=3)
    assert measured[0]["defaults"] == {name: getattr(defaults, name) for name in DEFAULTS}
