"""The engine child: one vLLM in a process of its own. Nothing in here imports TRL, DeepSpeed or the trainer."""
