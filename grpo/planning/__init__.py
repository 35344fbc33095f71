"""What `grpo plan` works out: placement and batch of a job, memory and push as estimates."""
