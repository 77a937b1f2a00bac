"""Worker metadata of a torch engine."""

from inlay import __version__
from inlay.card import Exactness, Limits, ModelCard
from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.grammar.grammars import KINDS
from inlay.engine.torch.step import Core
from inlay.request import Task


def card_of(settings: EngineSettings, core: Core, secret: Secret) -> ModelCard:
    """Return the metadata of an engine around `core`."""
    model, bounds = core.model, core.bounds
    names = settings.names
    max_abs = settings.max_prompt_embeds_abs
    features = ("greedy", "sampling", "penalties", "logprobs", "grammar")
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=model.path,
        weights_id=model.weights_id,
        dtype=core.dtype,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        limits=Limits(
            max_model_len=bounds.max_model_len,
            max_num_seqs=bounds.max_num_seqs,
            max_logprobs=settings.max_logprobs,
            max_prompt_embeds_abs=100 * model.embedding_abs_max if max_abs is None else max_abs,
        ),
        engine="torch",
        engine_version=__version__,
        tasks=(Task.GENERATE,),
        embedding_table_id=model.embedding_table_id,
        embedding_abs_max=model.embedding_abs_max,
        prompt_embeds=model.refuses_rows,
        block_size=bounds.page_size,
        num_blocks=bounds.num_pages,
        eos_token_ids=model.eos_token_ids,
        default_sampling=model.default_sampling,
        resuming=dict.fromkeys(features, Exactness.of_dtype(core.dtype)),
        grammars=KINDS,
        shares_text_prefix=True,
        secret_fingerprint=secret.fingerprint,
    )


__all__ = ["card_of"]
