"""The fleet of `tests.live` for all tests of the HTTP server."""

from tests.live import blanks, llama, plain_url, url

__all__ = ["blanks", "llama", "plain_url", "url"]
