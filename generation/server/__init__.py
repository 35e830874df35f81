"""vLLM's OpenAI-compatible server on an engine in training: exact ids, captured trajectories, no surprises."""

from generation.server.conversations import TooManyConversations
from generation.server.server import OpenAIServer
from generation.server.settings import ServerSettings, is_loopback

__all__ = ["OpenAIServer", "ServerSettings", "TooManyConversations", "is_loopback"]
