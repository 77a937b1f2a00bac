"""Connections between frontends and workers, and the messages on them.

`local` joins processes of one machine with a Unix socket and shared memory; `connection`,
`listener` and `endpoint` join machines with frames over TCP and TLS, and neighbours on one with the
same frames and shared memory; `stream` reads and writes their sockets, and `credit` lets a peer
send a large message without asking. `nats` carries what a fleet announces. `link` is a frontend's
end of any connection, `serve` a worker's; `api` has the protocols. A message is a msgpack header
and raw buffers (`frames`, `wire`); large buffers are received where they are used, and those that
the other end has are not sent.
"""

from typing import TYPE_CHECKING

from inlay.base.lazy import exported

if TYPE_CHECKING:
    from inlay.transport.connection import TcpPeer
    from inlay.transport.listener import Listener, dial
    from inlay.transport.memory import ReceiveMemory

__all__ = ["Listener", "ReceiveMemory", "TcpPeer", "dial"]

__getattr__ = exported(
    __name__,
    {
        "TcpPeer": "connection",
        "Listener": "listener",
        "dial": "listener",
        "ReceiveMemory": "memory",
    },
)
