"""vLLM's engine arguments for weight syncs, by name: importing the engine's side would load vLLM."""

WORKER = "grpo.weights.worker.AskedWorker"
"""Worker class, imported by vLLM in each worker before it looks up the backend; its module registers ours."""
BACKENDS = {"nccl": "grpo_nccl", "shm": "grpo_shm"}
"""vLLM's name of each transport."""


def transfer_args(transport: str) -> dict[str, str]:
    """Arguments of an engine that receives weights by `transport`, for `EngineSpec`."""
    return {"weight_transfer_config": BACKENDS[transport], "worker_extension_cls": WORKER}
