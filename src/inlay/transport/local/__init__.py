"""The plane of one machine: a Unix socket and shared memory, frontend to worker processes.

No NATS and no TLS: the other end is a process that this one has started.
"""

from inlay.transport.local.arena import RESERVED, Arena
from inlay.transport.local.channel import LocalTransport
from inlay.transport.local.plane import LocalPlane
from inlay.transport.local.routed import RoutedPlane

__all__ = ["RESERVED", "Arena", "LocalPlane", "LocalTransport", "RoutedPlane"]
