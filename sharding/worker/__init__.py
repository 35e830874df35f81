"""In vLLM's worker processes: how weights are received and loaded."""
