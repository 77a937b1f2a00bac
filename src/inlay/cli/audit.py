"""`inlay embeds audit`: how much known attacks read from rows."""

import sys

import msgspec
import numpy as np

from inlay.audit.attackers import ALL, chosen
from inlay.audit.external import CommandTransform, GivenRows, transform_of
from inlay.audit.prompts import PromptMaker
from inlay.audit.report import as_data, described, failures, limits
from inlay.audit.run import Audit
from inlay.audit.texts import read_texts, split
from inlay.audit.transform import Transform
from inlay.cli.audit_answers import ServerAnswers
from inlay.cli.client_settings import AuditSettings
from inlay.cli.command import UsageError
from inlay.cli.files import read
from inlay.cli.process import Console
from inlay.cli.progress import waiting
from inlay.client import PromptEmbedder

_FAILED = 1

_COMPARED = ("none", "noise:1", "noise:4", "rotate", "shuffle")
"""Transforms where none was given."""


def run(settings: AuditSettings) -> int:
    """Write what was read; the exit status: 1 where more can be read than --fail-above allows.

    Raises:
        UsageError: the words contradict each other.
        FileError: a file cannot be read.
        InvalidRequestError: texts, transforms or attackers are no such thing.
    """
    console = Console(sys.stdout, sys.stderr)
    doing = "the model's table"

    def tell(text: str) -> None:
        nonlocal doing
        doing = text

    with waiting(console, lambda: doing):
        gate = limits(settings.fail_above)
        attackers = tuple(settings.attackers or ALL)
        chosen(attackers)
        embedder = PromptEmbedder.from_pretrained(settings.model)
        width = embedder.table.shape[1]
        if settings.rows is not None and settings.public is not None:
            raise UsageError("--rows are those of --texts: --public has none; leave it out")
        own = bool(settings.rows or settings.transform_command)
        specs = settings.transform or (() if own else _COMPARED)
        transforms: list[Transform] = [transform_of(each, width, settings.seed) for each in specs]
        transforms += [CommandTransform(each) for each in settings.transform_command]
        maker = PromptMaker(embedder, chat=False if settings.plain else None)
        prompts = maker.prompts(read_texts(read(settings.texts), str(settings.texts)))
        if settings.rows is not None:
            transforms.append(GivenRows.of(settings.rows, len(prompts), width))
        if settings.public is not None:
            public = maker.prompts(read_texts(read(settings.public), str(settings.public)))
        else:
            mine, others = split(len(prompts), settings.seed)
            public = [prompts[index] for index in others]
            prompts = [prompts[index] for index in mine]
        ask = None
        if settings.url is not None:
            ask = ServerAnswers(
                settings.url, settings.api_key, settings.model_name, embedder.table.id
            )
        audit = Audit(
            prompts,
            public,
            embedder.table.rows(np.arange(embedder.table.shape[0])).astype(np.float32),
            maker.template,
            embedder.renderer.decode,
            attackers,
            settings.resends,
            settings.seed,
            ask,
            tell,
        )
        found = [audit.of(transform) for transform in transforms]
        failed = failures(gate, found)
    if settings.output_format == "json":
        data = as_data(audit, found) | {"model": settings.model, "failures": failed}
        console.out(msgspec.json.encode(data).decode() + "\n")
    else:
        console.out("\n".join(described(audit, found)) + "\n")
    for line in failed:
        console.line(line)
    return _FAILED if failed else 0
