"""Which worker gets a work."""

from inlay.router.model import ServedModel
from inlay.router.router import Router

__all__ = ["Router", "ServedModel"]
