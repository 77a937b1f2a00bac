"""The plane of many machines: works, streams and cards ride on NATS."""

from inlay.plane.nats.frontend import NatsPlane
from inlay.plane.nats.member import Member
from inlay.plane.nats.settings import NatsSettings
from inlay.plane.nats.worker import NatsWorker

__all__ = ["Member", "NatsPlane", "NatsSettings", "NatsWorker"]
