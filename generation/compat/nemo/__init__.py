"""NeMo RL's generation interface, which takes padded batches and returns ids and
log-probabilities.
"""
