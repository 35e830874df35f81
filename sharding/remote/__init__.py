"""Engines that do not share the trainer's GPUs, as the trainer's processes see them: orders,
broadcasts and folders.
"""
