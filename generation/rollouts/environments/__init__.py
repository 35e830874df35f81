"""Adapters for libraries of environments. A library is imported only when a recipe names its
adapter.
"""
