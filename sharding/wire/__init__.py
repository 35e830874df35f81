"""Used in both processes: the channel, the staging memory, the manifest and digests."""
