"""Back up a fleet's stored prompts, files of batches and kept responses, and restore them.

    python3 stored_prompts.py backup > FILE
    python3 stored_prompts.py restore < FILE

It serves meanwhile. Reaches NATS as a frontend with the same INLAY_ variables does. The file has a line with the
namespace's record of its secret: the secret itself where NATS keeps it, so keep the file as a key.
Then, for the records and for the contents, a line of JSON and the server's own snapshot in chunks
of the length that is before each. Restoring needs no stored prompts to be there, and brings the secret
back; where that is in files (--secret-file), the files have to be the same.
"""

import asyncio
import base64
import json
import os
import struct
import sys
from typing import Any, BinaryIO

import msgspec
import nats
from nats.aio.client import Client

from inlay.cli.commands import commands, known_variables
from inlay.cli.reading import parse, read
from inlay.cli.settings import FleetFrontendSettings
from inlay.store.reaper import LEASE
from inlay.transport.nats import secret
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.subjects import FILES, PROMPTS, Subjects
from inlay_state.service import KIND as RESPONSES

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
            await _back_up_secret(settings, sys.stdout.buffer)
            for kind in (PROMPTS, FILES, RESPONSES):
                name = Subjects(settings.namespace).kept(kind)
                # Records first: a content without a record is nothing to anyone.
                for stream in (f"KV_{name}", f"OBJ_{name}"):
                    await _back_up(client, stream, sys.stdout.buffer)
        else:
            while line := sys.stdin.buffer.readline():
                kept = json.loads(line)
                if "secret" in kept:
                    await _restore_secret(settings, base64.b64decode(kept["secret"]))
                else:
                    kept["config"]["num_replicas"] = settings.nats_replicas
                    await _restore(client, kept, sys.stdin.buffer)
    finally:
        await client.close()


async def _back_up_secret(settings: NatsSettings, file: BinaryIO) -> None:
    member = await Member.join(settings, "frontend")
    try:
        kept = await secret.record(await member.facts())
    finally:
        await member.leave()
    if kept is not None:
        text = base64.b64encode(msgspec.msgpack.encode(kept)).decode()
        file.write(json.dumps({"secret": text}).encode() + b"\n")


async def _restore_secret(settings: NatsSettings, data: bytes) -> None:
    """End with an error where the namespace has another secret that stays."""
    kept = msgspec.msgpack.decode(data, type=secret.SecretRecord)
    member = await Member.join(settings, "frontend")
    try:
        facts = await member.facts()
        before = await secret.recorded(facts)
        if before == kept.fingerprint:
            return
        other = before if not kept.root else await secret.uphold(facts, kept)
    finally:
        await member.leave()
    if other is not None:
        sys.exit(
            f"the backup is of the secret {kept.fingerprint}, and the namespace has {other}: "
            "nothing was restored"
        )
    sys.stderr.write(f"secret: {kept.fingerprint}")
    sys.stderr.write("\n" if before is None else ": start all frontends and workers again\n")


async def _back_up(client: Client, stream: str, file: BinaryIO) -> None:
    if await _asked(client, f"STREAM.INFO.{stream}", {}, or_none=True) is None:
        return  # Nothing of that kind was ever kept.
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
    asked = {"subjects_filter": ">"}
    there = await _asked(client, f"STREAM.INFO.{stream}", asked, or_none=True)
    if there is not None:
        # Who removes what has expired says so there too.
        found = there["state"].get("subjects") or ()
        if any(not subject.endswith(f".{LEASE}") for subject in found):
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
