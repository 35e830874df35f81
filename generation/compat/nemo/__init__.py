"""NeMo RL's generation interface: padded batches in, ids and log-probabilities out."""
