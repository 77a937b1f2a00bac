"""Score templates: chat templates that write a query and a document as one prompt.

They read either turns of the roles "query" and "document", as sentence-transformers saves them, or
variables of these names. An instruction is a turn of the role "system", and a variable.
"""

import secrets
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.render.template import ChatTemplate

_SIDES = ("query", "document")


class ScoredText(NamedTuple):
    """A prompt of a pair.

    Attributes:
        before: text before the document.
        document: as the template writes it.
        after: text behind it.
    """

    before: str
    document: str
    after: str


class ScoreTemplate:
    """A chat template that writes pairs.

    Args:
        template: of the model, or given in its place.

    Raises:
        InvalidRequestError: it reads no pairs.
    """

    def __init__(self, template: ChatTemplate) -> None:
        reads = template.variables()
        self._says = reads >= {*_SIDES} or all(map(template.names, _SIDES))
        self._instructs = "instruction" in reads or template.names("system")
        self._template = template
        if not self._says:
            raise InvalidRequestError(
                "the model has no score template: its chat template reads no turns, and no "
                "variables, query and document; serve it with --chat-template",
                param="model",
            )

    def written(
        self, query: str, document: str, instruction: str | None, default: str | None = None
    ) -> ScoredText:
        """Return the prompt of a pair.

        An empty instruction is none; `default` stands for one that is not given, where the template
        has a place for it.

        Raises:
            InvalidRequestError: the template fails, has no place for an instruction, or does not
                write the document exactly once.
        """
        if instruction is None and self._instructs:
            instruction = default
        if instruction and not self._instructs:
            raise InvalidRequestError(
                "the model's score template reads no instruction", param="instruction"
            )
        mark = secrets.token_hex(16)
        marked = self._render(query, mark, instruction).split(mark)
        whole = self._render(query, document, instruction)
        before, after = marked[0], marked[-1]
        if (
            len(marked) != 2
            or len(whole) < len(before) + len(after)
            or not (whole.startswith(before) and whole.endswith(after))
        ):
            raise InvalidRequestError(
                f"the model's score template writes a document {len(marked) - 1} times, or text "
                "around it that depends on it; it must stand once, as it is",
                param="model",
            )
        return ScoredText(before, whole[len(before) : len(whole) - len(after)], after)

    def _render(self, query: str, document: str, instruction: str | None) -> str:
        said = {"query": query, "document": document}
        told = {"instruction": instruction} if instruction else {}
        return self._template.render(
            [
                *({"role": "system", "content": text} for text in told.values()),
                *({"role": role, "content": text} for role, text in said.items()),
            ],
            tools=None,
            add_generation_prompt=True,
            variables=said | told,
        )
