"""`inlay bench write`: the bodies of a measurement as a file of JSON lines."""

import asyncio
import sys
from contextlib import ExitStack
from typing import BinaryIO

import msgspec

from inlay.cli.command import UsageError
from inlay.cli.process import Console, waiting
from inlay.client import Uploader
from inlay_tools.bench.workload import Workload
from inlay_tools.files import opening
from inlay_tools.http_client import HttpClient, served_model, server_of
from inlay_tools.settings import BenchWriteSettings


def run(settings: BenchWriteSettings) -> int:
    """Write the bodies; the exit status.

    Raises:
        UsageError: settings that contradict each other.
        FileError: the file cannot be written.
        InlayError: the server cannot be reached, or takes no uploads.
    """
    console = Console(sys.stdout, sys.stderr)
    if settings.output is None and settings.output_format == "json":
        raise UsageError("--output-format json needs --output FILE: the bodies go there")
    with ExitStack() as stack:
        file: BinaryIO = sys.stdout.buffer
        if settings.output is not None:
            stack.enter_context(opening(f"--output {settings.output}"))
            file = stack.enter_context(settings.output.open("wb"))
        runner = stack.enter_context(asyncio.Runner())
        written, size = runner.run(_write(settings, file, console))
    if settings.output_format == "json":
        said = {"file": str(settings.output), "requests": written, "bytes": size}
        console.out(msgspec.json.encode(said).decode() + "\n")
    elif settings.output is not None:
        console.line(f"{settings.output}: {written} requests, {size} bytes")
    return 0


async def _write(settings: BenchWriteSettings, file: BinaryIO, console: Console) -> tuple[int, int]:
    """Requests that were written, and their bytes."""
    server = server_of(settings.url, settings.api_key)
    client = HttpClient(server)
    written = size = 0

    def told() -> str:
        return f"{written} of {settings.workload.num_prompts} written"

    try:
        model = await served_model(client, settings.model_name)
        uploader = Uploader(server.url, server.api_key)
        workload = Workload(settings.workload, model, client, uploader)
        workload.check(held=False)
        with waiting(console, told):
            count = settings.workload.num_prompts
            async for body in workload.bodies(0, count, stream=settings.stream):
                size += file.write(body.data + b"\n")
                written += 1
        file.flush()
    finally:
        await client.close()
    return written, size
