"""The names under which a fleet talks on NATS.

All begin with `inlay.NAMESPACE`, so an account's permissions can be given by namespace and by kind.
A *participant* is a frontend or a worker; its id is a token of a subject.
"""

import re
import secrets
import socket
from dataclasses import dataclass

PROMPTS, FILES = "prompts", "files"
"""Kinds of what clients store: prompts; files, with batches of them."""

_unfit = re.compile(r"[^A-Za-z0-9-]+")


def participant_id(kind: str) -> str:
    """A new id, never used before: what it is, the machine it is on, random digits."""
    host = _unfit.sub("-", socket.gethostname())[:32].strip("-") or "host"
    return f"{kind}-{host}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Subjects:
    """The subjects of one namespace."""

    namespace: str

    def beats(self, worker: str = "*") -> str:
        """Heartbeats of workers."""
        return f"inlay.{self.namespace}.beat.{worker}"

    @property
    def roll_call(self) -> str:
        """Subject on which a new frontend asks all workers for a heartbeat."""
        return f"inlay.{self.namespace}.roll"

    def cache_events(self, worker: str = "*") -> str:
        return f"inlay.{self.namespace}.cache.{worker}"

    def loads(self, frontend: str = "*") -> str:
        """Loads that frontends have sent to workers."""
        return f"inlay.{self.namespace}.load.{frontend}"

    def invitations(self, worker: str) -> str:
        """Frontends that ask a worker to connect to them."""
        return f"inlay.{self.namespace}.invite.{worker}"

    def drains(self, worker: str) -> str:
        """Orders to a worker to drain and end."""
        return f"inlay.{self.namespace}.drain.{worker}"

    @property
    def cards(self) -> str:
        """The key-value bucket of cards, by worker."""
        return f"inlay_{self.namespace}_cards"

    def deleted(self, kind: str) -> str:
        """Names of what frontends have deleted, of a kind that they keep."""
        return f"inlay.{self.namespace}.deleted" + ("" if kind == PROMPTS else f".{kind}")

    def kept(self, kind: str) -> str:
        """The key-value bucket of what clients store, and the object store of the contents."""
        return f"inlay_{self.namespace}_{kind}"

    @property
    def namespace_facts(self) -> str:
        """The key-value bucket of what all of a namespace share."""
        return f"inlay_{self.namespace}"


def last_token(subject: str) -> str:
    return subject.rpartition(".")[2]
