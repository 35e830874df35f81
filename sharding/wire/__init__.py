"""Code for both processes, trainer and worker: the channel, the staging memory, the manifest and
digests.
"""
