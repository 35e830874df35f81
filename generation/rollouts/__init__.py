"""Rollouts at six levels: one answer, tools, environments, custom functions, samplers, and clients
of a server.
"""
