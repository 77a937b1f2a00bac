"""A command: its settings class and what it does with an instance of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pydantic import BaseModel

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
        settings: the only source of its flags, environment variables, config keys and reference
            page.
        run: does it, given an instance of `settings` and the words after `--`; returns the exit
            status. It imports what it needs when it is called, so that help is quick.
        details: what help says below the summary.
        positional: fields of `settings` that are given by their place.
        short: field name to one-letter flag.
        rest: what words after `--` are, which go on untouched; none are allowed where it is empty.
    """

    name: str
    summary: str
    settings: type[BaseModel]
    run: Callable[[Any, Sequence[str]], int]
    details: str = ""
    positional: tuple[str, ...] = ()
    short: Mapping[str, str] = field(default_factory=dict)
    rest: str = ""

    @cached_property
    def options(self) -> Options:
        """The options its settings class declares."""
        return Options.of(self.settings, positional=self.positional, short=self.short)
