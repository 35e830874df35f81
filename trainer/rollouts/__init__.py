"""A step's rollouts: how episodes run, on which engines, and how their answers reach the training
ranks.
"""
