"""The plane of one machine.

A Unix socket and shared memory between a frontend and its worker processes.
"""

from inlay.transport.local.arena import RESERVED, Arena
from inlay.transport.local.channel import LocalTransport
from inlay.transport.local.plane import LocalPlane
from inlay.transport.local.routed import RoutedPlane

__all__ = ["RESERVED", "Arena", "LocalPlane", "LocalTransport", "RoutedPlane"]
