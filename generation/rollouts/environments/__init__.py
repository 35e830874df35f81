"""Libraries of environments as `rollout.environment`: each is imported when a recipe names its file, and not before."""
