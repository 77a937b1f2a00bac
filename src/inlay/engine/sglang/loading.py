"""Starting SGLang with a model that generates, and what is known of it once it runs."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import sglang
from sglang.srt.arg_groups.overrides import resolved_view

from inlay.base.errors import InlayError
from inlay.engine.admission import Admission, MaxModelLen
from inlay.engine.model_files import default_sampling, eos_token_ids, generation_config, row_facts
from inlay.engine.settings import EngineSettings
from inlay.engine.sglang import capabilities, rooms
from inlay.engine.sglang.arguments import server_args
from inlay.engine.sglang.images import image_spec
from inlay.engine.sglang.media import SglangInputs
from inlay.engine.sglang.process import Process
from inlay.engine.slots import PROBES
from inlay.engine.weights import directory_of, for_other_engines, weights_id
from inlay.media.spec import MediaSpec
from inlay.messages.card import Exactness, Limits, ModelCard, Phase
from inlay.messages.digest import Secret
from inlay.messages.fields import LACKED_BY_SGLANG
from inlay.messages.request import Task
from inlay.tensors.checkpoint import config_of

log = logging.getLogger(__name__)

_MAX_LOGPROBS = 20


class LoadedSglang(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang running, and the facts of it.

    Attributes:
        card: what is announced.
        admission: what requests are held against.
        seeded: it draws from seeds.
        by_priority: it schedules by priority, the lowest value first.
        media: inputs of a model that takes images, or None.
    """

    card: ModelCard
    admission: Admission
    seeded: bool
    by_priority: bool
    media: SglangInputs | None = None


async def load(process: Process, settings: EngineSettings, secret: Secret) -> LoadedSglang:
    """Start SGLang in `process` for `settings`.

    Raises:
        InvalidRequestError: what SGLang or inlay refuses.
        EngineError: SGLang did not start.
    """
    directory = directory_of(settings.model.model, settings.model.revision)
    arguments = server_args(settings, for_other_engines(directory))
    await process.start(arguments)
    places = max(1, await process.max_running_requests() - PROBES)
    seeded = arguments.enable_deterministic_inference
    media = _media(process, settings, secret, directory)
    spec = None if media is None else media.spec
    card = _card(process, settings, secret, directory, places, spec, seeded=seeded)
    if settings.kv.role != "both":
        card = _half(process, card, settings.kv.role)
    return LoadedSglang(
        card=card,
        admission=Admission.of(card, MaxModelLen(card.limits.max_model_len, "SGLang")),
        seeded=seeded,
        by_priority=arguments.enable_priority_scheduling
        and arguments.schedule_low_priority_values_first,
        media=media,
    )


def longest(process: Process) -> int:
    """Positions that prompt and output may have together.

    SGLang keeps a few of its context for itself.
    """
    return int(process.facts["max_req_input_len"]) - 1


def dtype_of(process: Process) -> str:
    """By torch's name."""
    return str(process.client.model_config.dtype).removeprefix("torch.")


def rows_refused(model_type: object) -> str | None:
    """Return the reason why a model of this type takes no rows; None where it does."""
    if model_type in capabilities.ROWS_FROM:
        return None
    return capabilities.NOT_ALONE.format(model_type=model_type)


def _media(
    process: Process, settings: EngineSettings, secret: Secret, directory: Path
) -> SglangInputs | None:
    """The inputs of a model that takes images; None, with a line of the log, if not here."""
    try:
        spec = image_spec(settings, directory)
        if spec is None:
            return None
        media = SglangInputs(process.client.mm_processor, spec, secret)
        media.check()
    except InlayError as error:
        log.warning("the model serves text alone, without images: %s", error.message)
        return None
    return media


def _half(process: Process, card: ModelCard, phase: Phase) -> ModelCard:
    """The card of an SGLang that does one phase alone."""
    arguments = resolved_view(process.client.server_args)
    port = int(arguments.disaggregation_bootstrap_port)
    return msgspec.structs.replace(
        card,
        phase=phase,
        kv_rooms=rooms.form(card.engine_version, arguments, card.dtype),
        bootstrap=(str(arguments.host), port) if phase == "prefill" else None,
    )


def _card(
    process: Process,
    settings: EngineSettings,
    secret: Secret,
    directory: Path,
    places: int,
    media: MediaSpec | None,
    *,
    seeded: bool,
) -> ModelCard:
    model: Any = process.client.model_config
    generation, stored = generation_config(settings.model, directory), config_of(directory)
    dtype = dtype_of(process)
    refused = None if media is not None else rows_refused(stored.get("model_type"))
    rows = row_facts(settings.limits, directory, dtype, refused)
    names = settings.model.names
    sampling = default_sampling(generation, LACKED_BY_SGLANG)
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=str(directory),
        weights_id=weights_id(directory),
        dtype=dtype,
        vocab_size=int(model.vocab_size),
        hidden_size=int(model.hidden_size),
        limits=Limits(
            max_model_len=longest(process),
            max_num_seqs=places,
            max_logprobs=_MAX_LOGPROBS,
            max_prompt_embeds_abs=rows.bound,
        ),
        engine="sglang",
        engine_version=sglang.__version__,
        tasks=(Task.GENERATE,),
        embedding_table_id=rows.table_id,
        embedding_abs_max=rows.abs_max,
        prompt_embeds=rows.refused,
        num_blocks=int(process.facts["max_total_num_tokens"]) // 16,
        eos_token_ids=eos_token_ids(generation, stored.get("eos_token_id")),
        default_sampling=sampling,
        resuming={
            "greedy": Exactness.of_dtype(dtype),
            "sampling": Exactness.SAMPLED,
            "penalties": Exactness.IMPOSSIBLE,
            "logprobs": Exactness.of_dtype(dtype),
            "grammar": Exactness.IMPOSSIBLE,
        },
        shares_text_prefix=False,
        seeds=seeded,
        refusals=(*capabilities.REFUSALS, *((capabilities.SEEDED_MIN_P,) if seeded else ())),
        media=media,
        secret_fingerprint=secret.fingerprint,
    )
