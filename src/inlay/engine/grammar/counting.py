"""The count of grammars for an engine that compiles them itself."""

import asyncio
import json
from collections.abc import Hashable
from functools import partial

import msgspec

from inlay.base.single_flight import shielded
from inlay.engine.grammar.fair_executor import FairExecutor, SharedTask
from inlay.engine.grammar.source import schema_in
from inlay.engine.grammar.trial import Checked, Trial, TrialProcess, checked_source
from inlay.messages.request import Grammar

THREADS = 8
"""Trials at a time. So many clients must ask for costly grammars before another one waits."""


class GrammarCounter:
    """Counts grammars off the event loop; clients take turns.

    Cheap ones take no process; others are counted in one, `trials`, that is killed at its limits,
    or when the last client has left.
    """

    def __init__(self) -> None:
        self.trials = TrialProcess(None)
        self._turns: FairExecutor[Checked] = FairExecutor(THREADS, "inlay-grammar")

    def close(self) -> None:
        """Count nothing more; kill what is under way."""
        self._turns.close()
        self.trials.close()

    async def check(self, grammar: Grammar, client: Hashable) -> Grammar:
        """Refuse a grammar that would cost too much, or is none; return what is to be compiled.

        That is the grammar itself, or with a loose part of it loosened.

        Raises:
            InvalidRequestError: it is refused.
            EngineError: the process died.
            OverloadedError: the engine is closing.
        """
        trial = Trial(self.trials, grammar)
        task = SharedTask(partial(checked_source, grammar, trial), trial.stop)
        self._turns.submit(task, client)
        try:
            # Shielded: a task that is cancelled could not say that its thread is free.
            checked = await shielded(asyncio.wrap_future(task.done))
        finally:
            if self._turns.unsubscribe(task, client):
                task.stop()
        if not grammar.loose:
            return grammar
        return msgspec.structs.replace(grammar, source=json.dumps(schema_in(checked.source)))
