"""A run as processes and files: starting and ending them, checkpoints, metrics, tracking."""
