"""Adapters that give the engine the generation interfaces of other projects. No other package
imports them.
"""
