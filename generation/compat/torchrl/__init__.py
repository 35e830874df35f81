"""TorchRL's service: engines behind one `generate`, as local processes or Ray actors, and a balance of their load."""
