"""`inlay embeds upload`: a file of embeddings or an image to a server, for use by reference."""

import sys

import msgspec

from inlay.cli.process import Console, waiting
from inlay.client import StoredEmbeds, StoredImage, StoredVectors, Uploader
from inlay.client.prompts import container, naming
from inlay.client.uploader import is_image
from inlay_tools.files import named, read_to_send
from inlay_tools.settings import UploadSettings


def run(settings: UploadSettings) -> int:
    """Upload the file and print its id; the exit status.

    Raises:
        FileError: the file cannot be read, or is too large.
        InlayError: the server refuses it, or cannot be reached.
    """
    data = read_to_send(settings.file)
    key = None if settings.api_key is None else settings.api_key.get_secret_value()
    uploader = Uploader(settings.url, key)
    stored: StoredEmbeds | StoredImage | StoredVectors
    console = Console(sys.stdout, sys.stderr)
    with naming(named(settings.file)), waiting(console, f"uploading {len(data)} bytes"):
        if is_image(data):
            stored = uploader.upload_media(data, model=settings.model)
        else:
            stored = uploader.upload(container(data), model=settings.model)
    if settings.pin:
        stored = uploader.pin(stored.id)
    as_json = settings.output_json or settings.output_format == "json"
    text = msgspec.json.encode(stored).decode() if as_json else stored.id
    console.out(text + "\n")
    kept = "pinned" if stored.pinned else "until it is not used for its time to live"
    console.line(f"{_described(stored)}, {stored.bytes} bytes, kept {kept}")
    return 0


def _described(stored: StoredEmbeds | StoredImage | StoredVectors) -> str:
    if isinstance(stored, StoredVectors):
        return f"{stored.num_vectors} vectors of {stored.size}, {stored.dtype}"
    if isinstance(stored, StoredEmbeds):
        return f"{stored.num_tokens} rows of {stored.hidden_size}, {stored.dtype}"
    size = f"{stored.format}, {stored.width} x {stored.height}"
    return size if stored.num_tokens is None else f"{size}, {stored.num_tokens} positions"
