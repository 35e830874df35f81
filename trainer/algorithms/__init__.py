"""The mathematics of reinforcement learning on tokens: pure functions of tensors, none of which needs a trainer.

Shapes: P prompts, G samples a prompt, B sequences, T positions with a target. Log-probabilities are in nats.
"""
