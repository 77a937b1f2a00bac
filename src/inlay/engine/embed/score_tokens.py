"""Words by which a decoder scores, as token ids."""

from dataclasses import replace

from transformers import AutoConfig

from inlay.base.errors import InvalidRequestError
from inlay.embedding.config import EmbeddingConfig
from inlay.embedding.layouts import word_score
from inlay.engine.settings import EngineSettings
from inlay.render.tokenizer import load_tokenizer


def with_score_tokens(config: EmbeddingConfig, settings: EngineSettings) -> EmbeddingConfig:
    """Return `config` with the score that `score_tokens` names in place of its outputs.

    A score of two words is their softmax, of one its logit, whatever the files say.

    Raises:
        InvalidRequestError: more than two words, or one that is no token.
    """
    words = settings.pooling.score_tokens
    if not words:
        return config
    if len(words) > 2:
        raise InvalidRequestError(
            f"--score-tokens {','.join(words)}: allowed are one token or two",
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
    activation = "activation.Sigmoid" if len(ids) == 2 else "linear.Identity"
    return replace(
        config,
        outputs=(word_score(tuple(reversed(ids))),),
        activation=f"torch.nn.modules.{activation}",
    )


def check_words(config: EmbeddingConfig) -> None:
    """Check the ids of the words by which a supported decoder scores; other models have none.

    Raises:
        InvalidRequestError: ids outside the vocabulary, or equal.
    """
    words = [id_ for each in config.outputs for id_ in each.words]
    if not words:
        return
    model = AutoConfig.from_pretrained(config.directory, local_files_only=True)
    size = int(model.get_text_config().vocab_size)
    if len({*words}) != len(words) or not all(0 <= id_ < size for id_ in words):
        raise InvalidRequestError(
            f"scores are made of the logits of tokens {', '.join(map(str, words))} (LogitScore, "
            f"--score-tokens); allowed: one token or two that differ, from 0 to {size - 1}",
            param="score_tokens",
        )
