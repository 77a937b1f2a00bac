"""Sequences for tests of sampling."""

from collections.abc import Iterable

from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling


def sequence_of(
    sampling: Sampling,
    prompt: Iterable[int] = (),
    output: Iterable[int] = (),
    grammar: GrammarState | None = None,
) -> Sequence:
    ids = tuple(prompt)
    request = Request(
        id="one",
        prompts=(Prompt((Tokens(ids),) if ids else ()),),
        params=sampling,
        prior_output=tuple(output),
    )
    return Sequence(request, arrival=0, grammar=grammar)
