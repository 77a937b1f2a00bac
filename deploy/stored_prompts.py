"""Back up a fleet's stored prompts while it serves, and restore them.

    python3 stored_prompts.py backup > FILE
    python3 stored_prompts.py restore < FILE

Reaches NATS as a frontend with the same INLAY_ variables does. The file has, for the records and
for the contents, a line of JSON and the server's own snapshot in chunks of the length that is
before each. Restoring needs the fleet's secret to be the same, and no stored prompts to be there.
"""

import asyncio
import json
import os
import struct
import sys
from typing import Any, BinaryIO

import nats
from nats.aio.client import Client

from inlay.cli.commands import commands, known_variables
from inlay.cli.reading import parse, read
from inlay.cli.settings import FleetFrontendSettings
from inlay.transport.nats.subjects import PROMPTS, Subjects

_LENGTH = struct.Struct(">I")
_CHUNK_BYTES = 128 * 1024
_SECONDS = 60.0


async def main() -> None:
    """Do what the words say."""
    if sys.argv[1:] not in (["backup"], ["restore"]):
        sys.exit("usage: stored_prompts.py backup > FILE, or: stored_prompts.py restore < FILE")
    command = next(command for command in commands() if command.name == "frontend")
    read_settings = read(command, parse(command, []), os.environ, known_variables())
    assert isinstance(read_settings, FleetFrontendSettings)
    settings = read_settings.fleet
    tls = settings.tls()
    more = settings.login() | ({} if tls is None else {"tls": tls})
    client = await nats.connect(settings.urls, name="stored-prompts", **more)
    try:
        if sys.argv[1] == "backup":
            name = Subjects(settings.namespace).kept(PROMPTS)
            # Records first: a content without a record is nothing to anyone.
            for stream in (f"KV_{name}", f"OBJ_{name}"):
                await _back_up(client, stream, sys.stdout.buffer)
        else:
            while line := sys.stdin.buffer.readline():
                await _restore(client, json.loads(line), sys.stdin.buffer)
    finally:
        await client.close()


async def _back_up(client: Client, stream: str, file: BinaryIO) -> None:
    inbox = client.new_inbox()
    chunks = await client.subscribe(inbox)
    asked = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": _CHUNK_BYTES}
    found = await _asked(client, f"STREAM.SNAPSHOT.{stream}", asked)
    kept = {"stream": stream, "config": found["config"], "state": found["state"]}
    file.write(json.dumps(kept).encode() + b"\n")
    while True:
        message = await chunks.next_msg(_SECONDS)
        if not message.data and message.headers and message.headers.get("Status") != "204":
            sys.exit(f"{stream}: {message.headers}")
        file.write(_LENGTH.pack(len(message.data)) + message.data)
        if not message.data:
            break
        # The server waits for this before it sends many more.
        if message.reply:
            await message.respond(b"")
    await chunks.unsubscribe()
    sys.stderr.write(f"{stream}: {kept['state']['messages']} messages\n")


async def _restore(client: Client, kept: dict[str, Any], file: BinaryIO) -> None:
    stream = kept.pop("stream")
    there = await _asked(client, f"STREAM.INFO.{stream}", {}, or_none=True)
    if there is not None:
        if there["state"]["messages"]:
            sys.exit(f"{stream} has stored prompts already: nothing was restored to it")
        # A frontend that has started makes an empty one.
        await _asked(client, f"STREAM.DELETE.{stream}", {})
    target = (await _asked(client, f"STREAM.RESTORE.{stream}", kept))["deliver_subject"]
    while True:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        answer = (await client.request(target, file.read(length), timeout=_SECONDS)).data
        if answer and "error" in (said := json.loads(answer)):
            sys.exit(f"{stream}: {said['error']['description']}")
        if not length:
            break
    sys.stderr.write(f"{stream}: {kept['state']['messages']} messages\n")


async def _asked(
    client: Client, subject: str, body: dict[str, Any], *, or_none: bool = False
) -> Any:
    message = await client.request(
        f"$JS.API.{subject}", json.dumps(body).encode(), timeout=_SECONDS
    )
    answer = json.loads(message.data)
    if "error" not in answer:
        return answer
    if or_none and answer["error"]["code"] == 404:
        return None
    sys.exit(f"{subject}: {answer['error']['description']}")


if __name__ == "__main__":
    asyncio.run(main())
