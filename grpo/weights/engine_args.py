"""vLLM's arguments for the engine's side of a weight sync: by name, as importing that side loads vLLM."""

WORKER = "grpo.weights.worker.AskedWorker"
"""Imported by vLLM in each worker, before it looks for the backend: the module registers ours."""
BACKENDS = {"nccl": "grpo_nccl", "shm": "grpo_shm"}
"""What vLLM calls each transport."""


def transfer_args(transport: str) -> dict[str, str]:
    """Arguments of an engine whose weights arrive by `transport`, as `EngineSpec` has them."""
    return {"weight_transfer_config": BACKENDS[transport], "worker_extension_cls": WORKER}
