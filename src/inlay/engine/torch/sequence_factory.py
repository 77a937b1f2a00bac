"""Makes the sequence of a request: its digests, page runs and rotary positions."""

from inlay.engine.torch.adapters import LoraAdapters
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.prompt_media import RopePositions
from inlay.engine.torch.sequence import Sequence
from inlay.messages.digest import Chain, Secret, root_digest
from inlay.messages.request import Request


class SequenceFactory:
    """Makes sequences for one model, in the order of their arrival."""

    def __init__(
        self, model: CausalModel, adapters: LoraAdapters, secret: Secret, *, prefix_caching: bool
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._secret = secret
        self._prefix_caching = prefix_caching
        self._arrivals = 0

    def make(
        self,
        request: Request,
        expires: float | None = None,
        grammar: GrammarState | None = None,
    ) -> Sequence:
        """Return a sequence of which nothing is computed.

        Raises `NotFoundError` if the adapter of `request` is not loaded. Arguments as `Sequence`'s.
        """
        chain = None
        model, name = self._model, request.adapter
        adapter = None if name is None else self._adapters.content_id(name)
        if self._prefix_caching:
            root = root_digest(
                self._secret,
                weights_id=model.weights_id,
                dtype=str(model.dtype).removeprefix("torch."),
                adapter=adapter,
                salt=request.salt,
            )
            chain = Chain(root, self._secret)
        sequence = Sequence(
            request,
            arrival=self._arrivals,
            chain=chain,
            expires=expires,
            page_groups=len(model.windows),
            grammar=grammar,
            rope=RopePositions(request.prompt) if model.rope_axes == 3 else None,
        )
        self._arrivals += 1
        return sequence
