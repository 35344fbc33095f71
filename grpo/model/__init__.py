"""What a checkpoint's configuration, and a transformers model, say of themselves. Knows nothing of a job."""
