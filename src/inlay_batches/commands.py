"""The command of this extension."""

from pathlib import Path

from pydantic import BaseModel, Field, SecretStr

from inlay.cli.command import Command


class RunBatchSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay run-batch`: a file of requests, answered line by line."""

    input_file: Path
    """File of requests, one a line, as OpenAI's batches have them."""
    output_file: Path
    """File that the answers are appended to, one a line, in the order in which they come."""
    resume: bool = False
    """Go on with an output file: lines that it has are not asked again, and a torn last line is
    removed."""
    model: str | None = None
    """Directory of a model, or its name on the hub, to serve meanwhile. A server that runs already
    is asked unless set."""
    url: str | None = None
    """Base URL of the server, as OpenAI clients take it. OPENAI_BASE_URL and OPENAI_API_KEY are
    used unless set, then http://127.0.0.1:8000/v1."""
    api_key: SecretStr | None = None
    """Key to ask with."""
    max_inflight: int = Field(default=64, ge=1, le=4096)
    """Lines that are under way at a time."""


COMMANDS = (
    Command(
        name="run-batch",
        summary="Answer a file of requests line by line, into another file.",
        details="All lines are checked before one is asked. Asks a server that runs already, or "
        "serves --model meanwhile; words after -- are then options of inlay serve. A run that was "
        "ended goes on with --resume. Exit status 1 when a line was answered with an error.",
        module="inlay_batches.run_batch",
        settings=RunBatchSettings,
        positional=("input_file",),
        extra_args="SERVE OPTIONS",
    ),
)
