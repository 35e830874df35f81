"""Rollouts: from one generation per prompt to tools, environments, one's own code, and clients of a server."""
