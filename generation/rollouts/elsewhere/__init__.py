"""Programs for a Python that has an agent's packages instead of Hotbunk; they import nothing of
Hotbunk.
"""
