"""Words by which a decoder scores, as token ids."""

from dataclasses import replace

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.embedding.layouts import word_score
from inlay.engine.settings import EngineSettings
from inlay.render.tokenizer import load_tokenizer


def with_score_tokens(config: EmbeddingConfig, settings: EngineSettings) -> EmbeddingConfig:
    """Return `config` with the score that `score_tokens` names in place of its outputs.

    Raises:
        InvalidRequestError: more than two words, one that is no token, or another task.
    """
    words = settings.pooling.score_tokens
    if not words:
        return config
    if settings.model.task != "score" or len(words) > 2:
        raise InvalidRequestError(
            f"--score-tokens {','.join(words)} with --task {settings.model.task}: allowed with "
            "--task score, one token or two",
            param="score_tokens",
        )
    tokenizer = load_tokenizer(config.directory).tokenizer
    ids = []
    for word in words:
        found = tokenizer.encode(word, add_special_tokens=False).ids
        if len(found) != 1:
            raise InvalidRequestError(
                f"--score-tokens names {word!r}, which is {len(found)} tokens of this model; "
                "allowed: words of one token",
                param="score_tokens",
            )
        ids += found
    return replace(config, outputs=(word_score(tuple(reversed(ids))),))
