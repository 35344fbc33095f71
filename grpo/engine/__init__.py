"""One vLLM in a child process: its host, the local main's client, what they say, and what ends it with its trainer.

`weights`, `rollout` and `local_vllm` import it; it may import `groups`, `faults` and `place`.
It must not know TRL, DeepSpeed, ZeRO-3 or the trainer's configuration: the child would load them.
"""
