"""In the trainer's processes, for remote engines, which do not share its GPUs: orders, broadcasts
and folders.
"""
