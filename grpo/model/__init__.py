"""Facts read from a checkpoint's configuration and from a transformers model. Knows nothing of a job."""
