"""A vLLM-compatible engine without a model: the real connector runs on it, and every wrong read changes the text."""
