"""What a real ZeRO-3 engine holds after a step, by the storage of its tensors; started by torchrun.

`python zero_memory_job.py MODEL_CONFIG_FOLDER DEEPSPEED_CONFIG.json OUTPUT_FOLDER`: writes `<rank>.json`.
"""

import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import AutoConfig, AutoModelForCausalLM


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


folder, settings_file, out = sys.argv[1:]
settings = json.loads(Path(settings_file).read_text())
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, zero, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
ids = torch.randint(0, model.config.vocab_size, (2, 16))
engine.backward(engine(input_ids=ids, labels=ids).loss)
engine.step()

moments = [value for state in zero.optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
states = [zero.lp_param_buffer, zero.grad_partitions_flat_buffer, *zero.fp32_partitioned_groups_flat, *moments]
states += [master.grad for master in zero.fp32_partitioned_groups_flat if master.grad is not None]  # offload
whole = [parameter.data for parameter in model.parameters() if parameter.ds_persist]
gc.collect()
measured = {
    "states": storage_bytes(states),
    "reduce_bucket": storage_bytes(bucket.buffer for bucket in zero.ipg_buckets.values()),
    "persistent": storage_bytes(whole),
    "everything": storage_bytes(thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor)),
    "defaults": {name: getattr(DeepSpeedZeroConfig(), name) for name in settings["compare_defaults"]},
}
(Path(out) / f"{engine.global_rank}.json").write_text(json.dumps(measured))
