"""The server that a command asks, and what it says of its models."""

import os
from dataclasses import dataclass
from typing import Any

from pydantic import SecretStr

from inlay.cli.http_client import HttpClient, Server
from inlay.errors import EngineError, NotFoundError

DEFAULT_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class ServedModel:
    """A model as `/v1/models` describes it.

    Attributes:
        name: to ask for.
        hidden_size: elements of a row; None if the server does not say, as others than inlay.
        dtype: of its activations, likewise.
        max_model_len: positions, likewise.
        prompt_embeds: True if embeddings are taken as prompts, as far as the server says.
    """

    name: str
    hidden_size: int | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    prompt_embeds: bool = False


def server_of(url: str | None, api_key: SecretStr | None) -> Server:
    """The server that settings name, or the environment of OpenAI's clients.

    The key in that environment is sent to the server that is named there, and to no other.

    Raises:
        InvalidRequestError: not the URL of a server.
    """
    key = None if api_key is None else api_key.get_secret_value()
    if url is None:
        url = os.environ.get("OPENAI_BASE_URL")
        key = key or (os.environ.get("OPENAI_API_KEY") if url else None)
    return Server.of(url or DEFAULT_URL, key)


async def served_model(client: HttpClient, name: str | None) -> ServedModel:
    """A model by its name, or the server's first.

    Raises:
        NotFoundError: it has no such model.
        InlayError: it cannot be reached, or refuses the key.
    """
    answer = await client.json("GET", "/models")
    try:
        entries: list[dict[str, Any]] = answer["data"]
        names = [str(entry["id"]) for entry in entries]
    except (KeyError, TypeError) as error:
        raise EngineError(f"{client.server.url}/models lists no models") from error
    if not names:
        raise NotFoundError(f"{client.server.url} serves no model now")
    if name is not None and name not in names:
        raise NotFoundError(f"the model {name!r} does not exist; served: {', '.join(names)}")
    entry = entries[0 if name is None else names.index(name)]
    return ServedModel(
        name=str(entry["id"]),
        hidden_size=entry.get("hidden_size"),
        dtype=entry.get("dtype"),
        max_model_len=entry.get("max_model_len"),
        prompt_embeds="prompt_embeds" in entry.get("capabilities", ()),
    )
