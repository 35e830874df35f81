"""In the trainer's processes: the weights, how they are cut into buckets, sent and verified."""
