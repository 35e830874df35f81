"""The transports that bring the bytes of weights from the ranks to the workers, a file each
(`sync.way`).
"""
