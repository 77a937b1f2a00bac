"""The fleet of `tests.live`, and a NATS server, for all tests of kept responses."""

from tests.live import blanks, llama, plain_url, url
from tests.transport.conftest import nats_server

__all__ = ["blanks", "llama", "nats_server", "plain_url", "url"]
