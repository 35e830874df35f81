"""A vLLM engine with an explicit life cycle, and everything else that training uses of vLLM."""
