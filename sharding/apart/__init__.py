"""In the trainer's processes, for engines that do not share its GPUs: broadcasts and folders."""
