"""Roles of texts: tokens of a `RolePlan` as ids, and weights for a role without the model."""

import json
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import ENDLESS, EmbeddingConfig
from inlay.embedding.plan import RolePlan
from inlay.embedding.static import static_weights
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import RoleCard
from inlay.render.tokenizer import LoadedTokenizer, load_tokenizer

_PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")
"""Parts of a tokenizer that make ids of a text."""


def with_roles(card: EmbeddingCard, config: EmbeddingConfig) -> EmbeddingCard:
    """Return `card` with the model's roles, and with their markers as prompts where they are text.

    A marker is one token, as when the model was trained: as a text it would be several. One that
    the vocabulary has not is a text. A word that is no token is not skipped: all unknown words
    would be.

    Raises:
        InvalidRequestError: texts are filled up, and the tokenizer has no token for it.
    """
    if not config.roles:
        return card
    loaded = load_tokenizer(config.directory)
    id_of = loaded.tokenizer.token_to_id
    mask = loaded.special_tokens.get("mask_token") or loaded.special_tokens.get("eos_token")
    prompts, roles = dict(card.prompts), {}
    for name, plan in config.roles.items():
        if plan.static is not None:
            roles[name] = _static(plan.static, loaded, card)
            continue
        marker = _marker(plan, id_of)
        if plan.marker is not None:
            text = prompts.get(name, "").removeprefix(plan.marker)
            prompts[name] = text if marker is not None else plan.marker + text
        filler = plan.filler or mask
        filled = None if filler is None else id_of(filler)
        if plan.at_least and filled is None:
            raise InvalidRequestError(
                f"texts of role {name} are filled up to {plan.at_least} positions, and the "
                f"tokenizer has no token {filler or 'for it'}"
            )
        skip = {id_of(word) for word in plan.skip}
        roles[name] = RoleCard(
            marker=marker,
            at_most=plan.at_most,
            at_least=plan.at_least,
            filler=filled or 0,
            attend=plan.attend,
            skip=tuple(sorted(id_ for id_ in skip if id_ is not None)),
            suffix=tuple(loaded.tokenizer.encode(plan.suffix, add_special_tokens=False).ids),
        )
    return replace(card, prompts=prompts, roles=roles)


def _static(directory: Path, loaded: LoadedTokenizer, card: EmbeddingCard) -> RoleCard:
    """Return a role whose texts are read by the model's own tokenizer.

    Raises `InvalidRequestError` if the files have another, or not a weight for each id.
    """
    own = load_tokenizer(directory)
    texts = [json.loads(each.tokenizer.to_str()) for each in (own, loaded)]
    if any(texts[0].get(part) != texts[1].get(part) for part in _PARTS):
        raise InvalidRequestError(
            f"{directory} has another tokenizer than the model's documents, which is not served"
        )
    count, size = len(static_weights(directory)), card.outputs[0].size
    if count != size:
        raise InvalidRequestError(
            f"{directory} has weights for {count} ids; the model's vocabulary has {size}"
        )
    most = own.config.get("model_max_length")
    return RoleCard(
        static=str(directory),
        at_most=int(most) if most is not None and most < ENDLESS else None,
    )


def _marker(plan: RolePlan, id_of: Callable[[str], int | None]) -> int | None:
    if plan.marker is None:
        return None
    words = (plan.marker, *plan.marker.split()[:1])
    return next((id_ for id_ in map(id_of, words) if id_ is not None), None)
