"""One vLLM engine with an explicit life cycle: everything that training uses of vLLM."""
