"""One vLLM engine with an explicit life cycle: everything that training uses of vLLM."""

from generation.engine.engine import Engine, Leader

__all__ = ["Engine", "Leader"]
