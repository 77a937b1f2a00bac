"""Neighbours: processes of one user on one machine, which are no parent and child.

A process that listens on a TCP port listens on an abstract Unix socket too, whose name is made of
that port and the fingerprint of its certificate. Who has its address finds it there without being
told of it; elsewhere, and from a container with a network of its own, nobody is found and TCP is
used. Nothing of it is in a file system, and nothing is left whoever is killed. The kernel says
whose process the other is; both prove the namespace's secret as over TCP, for the same fingerprint.

The dialer makes two memories and hands their descriptors over. Each end gives out room in the one
that it receives into (`inlay.transport.memory`), and the other writes there what it would else
send. No memory is handed back, so the death of an end leaves nothing to clear, and one that stood
still and then writes on does so to memory that nobody reads any more.
"""

import fcntl
import mmap
import os
import socket
import struct
import sys
from contextlib import ExitStack
from typing import NamedTuple

from inlay.base.address import Address
from inlay.transport.local.arena import Arena
from inlay.transport.memory import ReceiveMemory
from inlay.transport.stream import readable

ARENA_BYTES = 128 * 1024 * 1024
"""Bytes of the memory that one end of a connection receives into."""
VERSION = 3
"""Version of what neighbours say to each other; those of another one do not find each other."""
_BACKLOG = 1024
_AVAILABLE = (
    sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS")
)
"""Some builds of Python know no such memory."""

_greeting = struct.Struct("<QQ")
_credentials = struct.Struct("3i")


class SharedMemory(NamedTuple):
    """Memory of a connection between neighbours.

    Attributes:
        ours: that this end receives into, or None.
        theirs: that the other end receives into, writable; empty where it has none.
    """

    ours: Arena | None
    theirs: memoryview


NOTHING_SHARED = SharedMemory(None, memoryview(b""))


def listening(port: int, fingerprint: bytes) -> socket.socket | None:
    """Return a socket that listens for neighbours; None where the system has no such sockets.

    Raises:
        OSError: it cannot listen.
    """
    if not _AVAILABLE:
        return None
    sock = _unix_socket()
    try:
        sock.bind(_name(port, fingerprint))
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def dialled(address: Address, memory: ReceiveMemory) -> tuple[socket.socket, SharedMemory] | None:
    """Return a socket to the neighbour at `address`, and what is shared; None if there is none.

    Raises:
        OSError: the system gives no memory.
    """
    if not _AVAILABLE:
        return None
    sock = _unix_socket()
    try:
        sock.connect(_name(address.port, address.fingerprint))
        known = _is_of_this_user(sock)
    except OSError:
        known = False
    if not known:
        sock.close()
        return None
    try:
        return sock, _offered(sock, memory)
    except OSError:
        sock.close()
        raise


def _offered(sock: socket.socket, memory: ReceiveMemory) -> SharedMemory:
    """Make memory for both ends, and hand it over; none where this one has enough."""
    if not memory.may_share(ARENA_BYTES):
        sock.sendall(_greeting.pack(0, 0))
        return NOTHING_SHARED
    with ExitStack() as handed_over:
        # The mappings have descriptors of their own.
        ours = _sealed_file(ARENA_BYTES)
        handed_over.callback(os.close, ours)
        theirs = _sealed_file(ARENA_BYTES)
        handed_over.callback(os.close, theirs)
        socket.send_fds(sock, [_greeting.pack(ARENA_BYTES, ARENA_BYTES)], [ours, theirs])
        return _shared(ours, theirs, memory)


async def greeted(sock: socket.socket, memory: ReceiveMemory) -> SharedMemory:
    """Return what a neighbour that has connected shares.

    Raises:
        OSError: it is no neighbour, or has ended.
        ValueError: what it shares is none.
    """
    if not _is_of_this_user(sock):
        raise PermissionError("it is a process of another user")
    sock.setblocking(False)
    await readable(sock)
    data, found, _, _ = socket.recv_fds(sock, _greeting.size, 2, socket.MSG_CMSG_CLOEXEC)
    try:
        if len(data) != _greeting.size:
            raise ValueError("it does not greet")
        sizes = _greeting.unpack(data)
        if not any(sizes) and not found:
            return NOTHING_SHARED
        if len(found) != 2 or sizes != (ARENA_BYTES, ARENA_BYTES):
            raise ValueError(f"it shares {len(found)} memories of {sizes} bytes")
        theirs, ours = found
        for fd in found:
            # Memory that is cut short under a mapping ends the process that touches it.
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it shares memory that it could cut short")
            if os.fstat(fd).st_size != ARENA_BYTES:
                raise ValueError("it shares memory of another size than it says")
        return _shared(ours if memory.may_share(ARENA_BYTES) else None, theirs, memory)
    finally:
        for fd in found:
            os.close(fd)


def _shared(ours: int | None, theirs: int, memory: ReceiveMemory) -> SharedMemory:
    arena = None
    if ours is not None:
        arena = Arena(ARENA_BYTES, ours, places=True)
        memory.add(arena)
    return SharedMemory(arena, memoryview(mmap.mmap(theirs, ARENA_BYTES)))


def _sealed_file(size: int) -> int:
    fd = os.memfd_create("inlay", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)


def _name(port: int, fingerprint: bytes) -> str:
    return f"\0inlay/{VERSION}/{port}/{fingerprint.hex()}"


def _is_of_this_user(sock: socket.socket) -> bool:
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _credentials.size)
    _, user, _ = _credentials.unpack(found)
    return bool(user == os.geteuid())
