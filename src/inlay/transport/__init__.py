"""Direct connections between processes: frames over a Unix socket or TCP with TLS."""

from inlay.transport.connection import Connection
from inlay.transport.listener import Listener, dial
from inlay.transport.memory import ReceiveMemory

__all__ = ["Connection", "Listener", "ReceiveMemory", "dial"]
