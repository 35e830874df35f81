"""Custom logits processors, named in the recipe, for both of vLLM's interfaces."""
