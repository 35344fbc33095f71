"""Which families of models the weights of have a place in vLLM: the table of docs/models.md."""
