"""A command: its settings class and what it does with an instance of it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import importing
from inlay.cli.options import Options


class UsageError(Exception):
    """Invalid command line or setting; shown as one line, exit status 2."""


class FileError(UsageError):
    """A file that was named cannot be read or written; help would say nothing about it."""


@dataclass(frozen=True)
class Command:
    """One command of `inlay`.

    Attributes:
        name: as typed after `inlay`: "serve", "embeds encode".
        summary: one line.
        module: dotted name of the module whose function `run` does it: given an instance of
            `settings` and, unless `extra_args` is empty, the words after `--`, it returns the exit
            status.
        settings: the only source of its flags, environment variables, config keys and reference
            page.
        details: what help says below the summary.
        positional: fields of `settings` that are given by their place.
        first: fields that help shows; the rest then by heading or word. All where it is empty.
        suggest: says, where a positional is missing, what it could be.
        ahead: given its settings, does within what can go on while its module is imported and runs.
        extra_args: meaning of the words after `--`, which go on untouched; none may be where empty.
        needs_nats: True if it cannot do without the client of NATS.
        borrows: fields that it takes from the file that INLAY_CONFIG names, which is another
            command's: in a frontend's or a worker's container. Empty: the file is its own.
    """

    name: str
    summary: str
    module: str
    settings: type[BaseModel]
    details: str = ""
    positional: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    suggest: Callable[[], str] = str
    ahead: Callable[[Any], AbstractContextManager[object]] = nullcontext
    extra_args: str = ""
    needs_nats: bool = False
    borrows: frozenset[str] = frozenset()

    @cached_property
    def options(self) -> Options:
        """The options its settings class declares."""
        return Options.of(self.settings, positional=self.positional)

    def run(self, settings: BaseModel, extra_args: Sequence[str]) -> int:
        """Import the module, so late that help is quick, and do what it does; the exit status.

        Raises:
            InvalidRequestError: the client of NATS is not installed.
        """
        if self.needs_nats and find_spec("nats") is None:
            raise InvalidRequestError(f"a fleet needs NATS' client: {extras.install('nats')}")
        with self.ahead(settings):
            with importing():
                module = import_module(self.module)
            words = (extra_args,) if self.extra_args else ()
            status: int = module.run(settings, *words)
        return status
