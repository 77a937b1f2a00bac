"""The fleets of `tests.live` and of `tests.api.saying` for all tests of the APIs."""

from tests.api.saying import echo, says
from tests.live import blanks, llama, plain_url, url

__all__ = ["blanks", "echo", "llama", "plain_url", "says", "url"]
