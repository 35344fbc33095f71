"""One vLLM engine in a child process: its host, the local main's client, their messages, and its end with the trainer.

`weights`, `rollout` and `local_vllm` import it; it may import `groups`, `faults` and `place`. It must not know TRL,
DeepSpeed, ZeRO-3 or the trainer's configuration: the child would load them.
"""
