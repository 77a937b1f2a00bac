"""`inlay embeds audit`: how much known attacks read from rows."""

import hashlib
import math
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.cli.command import UsageError
from inlay.cli.process import EXIT_INTERRUPTED, Console, waiting
from inlay.client import PromptEmbedder
from inlay.tensors.hub import local_directory
from inlay.tensors.weight_files import find_weights
from inlay_audit.answers import Ask, Diverge
from inlay_audit.attackers import ALL, NEED_TORCH, NEED_WEIGHTS, spelled_out
from inlay_audit.attackers.lookup import LARGE_TABLE
from inlay_audit.document import document
from inlay_audit.external import CommandTransform, GivenRows, transform_of
from inlay_audit.gate import Gate
from inlay_audit.prompts import PromptMaker, read_texts, split
from inlay_audit.report import NOTES, as_data, begun, chart, described
from inlay_audit.run import Audit, Audited
from inlay_audit.server_answers import ANSWER_TOKENS, ServerAnswers
from inlay_audit.settings import AuditSettings
from inlay_audit.transform import Setting, Transform
from inlay_audit.verdict import compared
from inlay_tools.files import read, write_bytes

if TYPE_CHECKING:
    from inlay_audit.neural.language_model import LanguageModel

_FAILED = 1
_UNJUDGED = 2
"""Statuses: a bound is passed, and one cannot be judged."""

_TORCH = find_spec("torch") is not None and find_spec("transformers") is not None

_LARGE = 4 << 30
"""Bytes of weights above which attackers that need them run only where they are named."""

_SAMPLE = 60
"""Texts that are read of a large vocabulary where nothing else is asked for: at 85 % of tokens the
interval is about 3 points to each side."""

_COMPARED = ("none", "noise:1", "noise:4", "rotate", "shuffle")
"""Transforms where none was given."""


def run(settings: AuditSettings) -> int:
    """Write what was read; the exit status.

    It is 1 where a bound of the gate is passed, 2 where one cannot be judged.

    Raises:
        UsageError: the words contradict each other.
        FileError: a file cannot be read.
        InvalidRequestError: texts, transforms or attackers are no such thing.
    """
    console = Console(sys.stdout, sys.stderr)
    earlier = [(path.stem, _report(path)) for path in settings.compare]
    doing, place = "the model's table", ""

    def tell(text: str) -> None:
        nonlocal doing
        doing = text

    def progress() -> str:
        return doing + place

    with waiting(console, progress):
        gate = Gate.of(settings.fail_above, settings.thresholds)
        texts = read(settings.texts)
        audit, transforms = _prepared(settings, texts, max(_SAMPLE, gate.least_texts), tell)
    told = settings.output_format != "json"
    if told:
        console.out(begun(audit) + "\n")
    found: list[Audited] = []
    interrupted = False
    for number, transform in enumerate(transforms, 1):
        place = f", transform {number} of {len(transforms)}"
        try:
            with waiting(console, progress):
                found.append(audit.of(transform))
        except KeyboardInterrupt:
            if not found:
                raise
            # It may have taken minutes: what was found until now is told.
            interrupted = True
            break
        # A transform may take minutes: what was found is not kept back until all are done.
        if told:
            console.out("\n".join(["", *described(found[-1])]) + "\n")
    data = as_data(audit, found) | {"model": settings.model, "complete": not interrupted}
    beside = compared([*earlier, ("this", data)]) if earlier else []
    if told:
        console.out("".join(f"{line}\n" for line in ["", *beside] if beside))
        console.out("\n".join(["", *NOTES]) + "\n")
    failed, unjudged = gate.failures(found), gate.unjudged(found, len(audit.prompts))
    if settings.svg is not None:
        write_bytes(chart(found).encode(), settings.svg, "--svg")
    if settings.report is not None:
        digest = hashlib.sha256(texts).hexdigest()
        page = document(data, found, settings.model, digest)
        write_bytes(page.encode(), settings.report, "--report")
    if not told:
        console.out(
            msgspec.json.encode(data | {"failures": failed, "unjudged": unjudged}).decode() + "\n"
        )
    for line in [*failed, *unjudged]:
        console.line(line)
    if interrupted:
        return EXIT_INTERRUPTED
    return _FAILED if failed else _UNJUDGED if unjudged else 0


def _report(path: Path) -> dict[str, Any]:
    """An earlier report. Raises `FileError`, or `InvalidRequestError` where it is none."""
    try:
        found: dict[str, Any] = msgspec.json.decode(read(path))
        compared([("", found)])
    except (msgspec.MsgspecError, LookupError, TypeError) as error:
        raise InvalidRequestError(
            f"{path} is no report of this command (-o json), or one of an earlier version"
        ) from error
    return found


def _prepared(
    settings: AuditSettings, texts: bytes, sample: int, tell: Callable[[str], None]
) -> tuple[Audit, list[Transform]]:
    """The audit and its transforms; both raise what `run` does.

    Of a large vocabulary `sample` texts are read where the settings say nothing.
    """
    attackers = spelled_out(settings.attackers)
    if settings.answers and settings.url is not None:
        raise UsageError("--answers are computed here, those of --url there: leave one out")
    if settings.rows is not None and settings.public is not None:
        raise UsageError("--rows are of the texts of --texts: leave --public out")
    embedder = PromptEmbedder.from_pretrained(settings.model)
    width = embedder.table.shape[1]
    table = embedder.table.rows(np.arange(embedder.table.shape[0])).astype(np.float32)
    model = _model(settings.model)
    own = bool(settings.rows or settings.transform_command)
    specs = settings.transform or (() if own else _COMPARED)
    maker = PromptMaker(embedder, chat=False if settings.plain else None)
    prompts = maker.prompts(read_texts(texts, str(settings.texts)))
    given: list[Transform] = [CommandTransform(each) for each in settings.transform_command]
    if settings.rows is not None:
        given.append(GivenRows.of(settings.rows, len(prompts), width))
    if settings.public is not None:
        public = maker.prompts(read_texts(read(settings.public), str(settings.public)))
    else:
        mine, others = split(len(prompts), settings.seed)
        public = [prompts[index] for index in others]
        prompts = [prompts[index] for index in mine]
    of_texts = len(prompts)
    most = settings.most_texts or (sample if len(table) > LARGE_TABLE else of_texts)
    if most < of_texts:
        rng = np.random.default_rng([settings.seed, 3])
        kept = np.sort(rng.permutation(of_texts)[:most])
        prompts = [prompts[index] for index in kept]
    setting = Setting(table, public, settings.seed, model)
    transforms: list[Transform] = []
    for spec in specs:
        tell(f"{spec}: made ready")
        transforms.append(transform_of(spec, setting))
    transforms += given
    ask: Ask | None = None
    diverge: Diverge | None = None
    if settings.answers:
        from inlay_audit.neural.language_model import ModelAnswers

        here = ModelAnswers(model(), embedder.renderer.decode, ANSWER_TOKENS)
        ask, diverge = here, here.divergence
    elif settings.url is not None:
        tell(f"{settings.url}: asked for its model")
        ask = ServerAnswers(settings.url, settings.api_key, settings.model_name, embedder.table.id)
        # Attackers take a while: a server that is not there is told of before they begin.
        ask.find_model()
    audit = Audit(
        prompts,
        public,
        table,
        maker.template,
        embedder.renderer.decode,
        attackers or _attackers(settings.model),
        settings.resends,
        settings.seed,
        ask,
        tell,
        diverge,
        model if _TORCH else None,
        math.inf if settings.budget is None else settings.budget,
        settings.dtype,
        of_texts,
    )
    return audit, transforms


def _model(name: str) -> Callable[[], "LanguageModel"]:
    """Loads the whole model when it is first needed."""

    @cache
    def load() -> "LanguageModel":
        if not _TORCH:
            raise InvalidRequestError(f"the whole model needs torch: {extras.install('torch')}")
        from inlay_audit.neural.language_model import LanguageModel

        return LanguageModel.load(name)

    return load


def _attackers(name: str) -> tuple[str, ...]:
    """All attackers that run on this machine in minutes."""
    left_out: tuple[str, ...] = () if _TORCH else NEED_TORCH
    directory = local_directory(name)
    weights = None if directory is None else find_weights(directory)
    if weights is None or sum(file.stat().st_size for file in weights.paths()) > _LARGE:
        left_out += NEED_WEIGHTS
    return tuple(each for each in ALL if each not in left_out)
