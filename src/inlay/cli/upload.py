"""`inlay embeds upload`: a file of embeddings to a server, for use by reference."""

import sys

import msgspec

from inlay.cli.files import read
from inlay.cli.process import Console
from inlay.cli.settings import UploadSettings
from inlay.client import Uploader
from inlay.client.prompts import container


def run(settings: UploadSettings) -> int:
    """Upload the file and print its id; the exit status.

    Raises:
        FileError: the file cannot be read.
        InlayError: the server refuses it, or cannot be reached.
    """
    data = container(read(settings.file))
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    uploader = Uploader(settings.url, key)
    stored = uploader.upload(data, model=settings.model)
    if settings.pin:
        stored = uploader.pin(stored.id)
    console = Console(sys.stdout, sys.stderr)
    text = msgspec.json.encode(stored).decode() if settings.output_json else stored.id
    console.out(text + "\n")
    kept = "pinned" if stored.pinned else "until it is not used for its time to live"
    console.line(
        f"{stored.num_tokens} rows of {stored.hidden_size}, {stored.dtype}, {stored.bytes} bytes, "
        f"kept {kept}"
    )
    return 0
