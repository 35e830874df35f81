"""TorchRL's vLLM service: engines behind one `generate`, as local processes or Ray actors, with a
load balancer.
"""
