"""vLLM's OpenAI-compatible server on an engine in training: exact ids, captured trajectories, no surprises."""

from .asgi import is_loopback
from .conversations import TooManyConversations
from .server import OpenAIServer
from .settings import ServerSettings

__all__ = ["OpenAIServer", "ServerSettings", "TooManyConversations", "is_loopback"]
