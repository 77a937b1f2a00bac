"""The plane of one machine: a Unix socket and shared memory between a frontend and its worker processes."""

from inlay.plane.local.arena import RESERVED, Arena
from inlay.plane.local.channel import Channel
from inlay.plane.local.frontend import Link, LocalPlane
from inlay.plane.local.routed import RoutedPlane
from inlay.plane.local.worker import serve

__all__ = ["RESERVED", "Arena", "Channel", "Link", "LocalPlane", "RoutedPlane", "serve"]
