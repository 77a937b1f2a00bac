"""The fleet of `tests.live` for all tests of the APIs."""

from tests.live import blanks, llama, plain_url, url

__all__ = ["blanks", "llama", "plain_url", "url"]
