"""Recipes: every key with its type, default and meaning, read and checked before torch is
loaded.
"""
