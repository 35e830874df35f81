"""ChatLearn's vLLM backend: `VLLMModule`, its data and its hyper-parameters."""
