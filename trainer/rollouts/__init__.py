"""A step's rollouts: what an episode is, on which engines it runs, and how answers get to the ranks that train."""
