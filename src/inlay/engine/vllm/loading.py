"""Starting vLLM, and what is known of it once it runs."""

import logging
import os
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import msgspec
import vllm
from vllm.usage.usage_lib import UsageContext

from inlay.base.errors import EngineError, InlayError
from inlay.engine.admission import Admission, MaxModelLen
from inlay.engine.grammar.counting import GrammarCounter
from inlay.engine.kv_chain import NotedItem
from inlay.engine.model_files import default_sampling, eos_token_ids, generation_config, row_facts
from inlay.engine.settings import EngineSettings
from inlay.engine.slots import PROBES
from inlay.engine.vllm import capabilities, environment, prompts, reasoning, thinking
from inlay.engine.vllm.arguments import engine_args
from inlay.engine.vllm.cache_events import VllmCacheEvents
from inlay.engine.vllm.capabilities import ids_are_looked_up, rows_refused
from inlay.engine.vllm.connectors import (
    block_layout,
    check_hand_over,
    gives_tickets,
    ranks_of,
    transfer_config,
)
from inlay.engine.vllm.images import image_spec
from inlay.engine.vllm.launching import launch, refused
from inlay.engine.vllm.media import VllmInputs
from inlay.engine.vllm.sampling import KINDS
from inlay.engine.vllm.stats import Counters
from inlay.engine.vllm.tickets import TicketOffice
from inlay.engine.weights import directory_of, for_other_engines, weights_id
from inlay.media.spec import MediaSpec
from inlay.messages.card import Exactness, Limits, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.fields import LACKED_BY_VLLM
from inlay.messages.request import Request, Task
from inlay.tensors.checkpoint import config_of

log = logging.getLogger(__name__)


class LoadedVllm(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM running, and the facts of it.

    Attributes:
        llm: its `AsyncLLM`.
        card: what is announced.
        admission: what requests are held against.
        counters: its statistics.
        placeholder: the id in the place of a row: one that no token has, so that penalties do not
            see it.
        by_priority: it schedules by priority.
        sleeps: it was started with sleep mode.
        lora: its LoRA configuration, or None.
        grammars: counts grammars before vLLM compiles them.
        media: makes the inputs of a model that takes images; None of others.
        tickets: of prompts that are handed over; None where none are.
    """

    llm: Any
    card: ModelCard
    admission: Admission
    counters: Counters
    placeholder: int
    by_priority: bool
    sleeps: bool
    lora: Any
    grammars: GrammarCounter
    media: VllmInputs | None
    tickets: TicketOffice | None

    async def input_of(self, request: Request) -> tuple[Any, list[NotedItem]]:
        """VLLM's input for `request`, and the meaning of its items' names.

        Raises as `VllmInputs.input_of`.
        """
        if self.media is None:
            return prompts.input_of(request, self.placeholder), []
        return await self.media.input_of(request)

    def close(self) -> None:
        """Stop what runs beside vLLM."""
        self.grammars.close()
        if self.media is not None:
            self.media.close()

    def check_thinking(self, request: Request) -> None:
        thinking.check(request, self.llm.vllm_config)

    async def check_grammar(self, request: Request) -> Request:
        """Return a request with the grammar that vLLM is to compile.

        Raises `InvalidRequestError` for one that would cost too much, or is none.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return request
        grammar = await self.grammars.check(grammar, request.client)
        sampling = msgspec.structs.replace(request.sampling, grammar=grammar)
        return msgspec.structs.replace(request, params=sampling)

    async def guard_against_nan(self) -> None:
        """Have vLLM count NaN by request, and clean up.

        Raises `EngineError` where it is one that cannot be taught to.
        """
        try:
            await self.llm.collective_rpc("guard_against_nan")
        except Exception as error:
            raise EngineError(
                f"vLLM {vllm.__version__} cannot be told to say whose logits hold NaN: {error}"
            ) from error

    def watch_logits(self, corrupted: Callable[[str], None]) -> None:
        """Call `corrupted` with vLLM's id of a request with NaN logits, before its output."""
        processor = self.llm.output_processor
        process = processor.process_outputs

        def watched(outputs: Any, *arguments: Any, **more: Any) -> Any:
            for output in outputs:
                if output.num_nans_in_logits:
                    corrupted(output.request_id)
            return process(outputs, *arguments, **more)

        processor.process_outputs = watched


def load(
    settings: EngineSettings, secret: Secret, adapters: Container[str], events: VllmCacheEvents
) -> LoadedVllm:
    """Start vLLM for `settings`; blocks until the model is loaded.

    Args:
        settings: inlay's, with the words for vLLM.
        secret: of the namespace.
        adapters: names of those that are loaded; it changes.
        events: turned on.

    Raises:
        InvalidRequestError: what vLLM or inlay refuses.
        EngineError: vLLM did not start.
    """
    environment.check(os.environ)
    directory = directory_of(settings.model.model, settings.model.revision)
    arguments = engine_args(settings, for_other_engines(directory))
    thinking.turn_on(arguments, directory)
    counters = Counters()
    with refused():
        config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        known = config.parallel_config.data_parallel_size > 1
        events.turn_on(config, 0 if known else settings.devices.data_parallel_rank or 0)
        own_reasoning = not reasoning.turn_on(config)
    handed_over = gives_tickets(transfer_config(settings))
    if handed_over:
        check_hand_over(config)
    places = int(config.scheduler_config.max_num_seqs)
    config.scheduler_config.max_num_seqs = places + PROBES
    llm = launch(config, counters)
    try:
        media = _media(llm, settings, secret, directory)
        spec = None if media is None else media.spec
        card = _card(config, settings, secret, directory, own_reasoning, places, spec)
        tickets = None
        if handed_over:
            layout = block_layout(config, vllm.__version__)
            card = msgspec.structs.replace(
                card, kv_layout=layout, kv_tickets=True, phase=settings.kv.role
            )
            engine_id = config.kv_transfer_config.engine_id
            tickets = TicketOffice(secret, card, engine_id, ranks_of(config))
        return _described(llm, config, card, counters, adapters, media, tickets)
    except BaseException:
        llm.shutdown()
        raise


def _media(
    llm: Any, settings: EngineSettings, secret: Secret, directory: Path
) -> VllmInputs | None:
    """The inputs of a model that takes images; None, with a line of the log, if not here."""
    try:
        spec = image_spec(settings, directory)
        media = None if spec is None else VllmInputs(llm.renderer, spec, secret)
        if media is not None:
            media.check()
    except InlayError as error:
        log.warning("the model serves text alone, without images: %s", error.message)
        return None
    return media


def _card(
    config: Any,
    settings: EngineSettings,
    secret: Secret,
    directory: Path,
    own_reasoning: bool,
    places: int,
    media: MediaSpec | None,
) -> ModelCard:
    model = config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    generation = generation_config(settings.model, directory)
    model_config = config_of(directory)
    vocab_size, hidden_size = int(model.get_vocab_size()), int(model.get_inputs_embeds_size())
    refused = rows_refused(config, model_config, takes_images=media is not None)
    rows = row_facts(settings.limits, directory, dtype, refused)
    names = settings.model.names
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=str(directory),
        weights_id=weights_id(directory),
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        limits=Limits(
            max_model_len=int(model.max_model_len),
            max_num_seqs=places,
            max_logprobs=vocab_size if model.max_logprobs == -1 else int(model.max_logprobs),
            max_prompt_embeds_abs=rows.bound,
        ),
        engine="vllm",
        engine_version=vllm.__version__,
        tasks=(Task.GENERATE,),
        embedding_table_id=rows.table_id,
        embedding_abs_max=rows.abs_max,
        prompt_embeds=rows.refused,
        block_size=int(config.cache_config.block_size),
        num_blocks=int(config.cache_config.num_gpu_blocks or 0),
        eos_token_ids=eos_token_ids(generation, model_config.get("eos_token_id")),
        default_sampling=default_sampling(generation, LACKED_BY_VLLM),
        resuming={
            "greedy": Exactness.of_dtype(dtype),
            "sampling": Exactness.SAMPLED,
            "penalties": Exactness.IMPOSSIBLE,
            "logprobs": Exactness.of_dtype(dtype),
            "grammar": Exactness.IMPOSSIBLE,
        },
        grammars=KINDS,
        shares_text_prefix=media is not None,
        refusals=capabilities.refusals(
            ids_are_looked_up=ids_are_looked_up(config),
            own_reasoning=own_reasoning,
            mixes_logprobs=not config.use_v2_model_runner,
            counts_thinking=thinking.counts(config),
            takes_images=media is not None,
        ),
        media=media,
        secret_fingerprint=secret.fingerprint,
    )


def _described(
    llm: Any,
    config: Any,
    card: ModelCard,
    counters: Counters,
    adapters: Container[str],
    media: VllmInputs | None,
    tickets: TicketOffice | None,
) -> LoadedVllm:
    return LoadedVllm(
        llm=llm,
        card=card,
        admission=Admission.of(
            card, MaxModelLen(card.limits.max_model_len, "vLLM"), adapters=adapters
        ),
        counters=counters,
        placeholder=0 if ids_are_looked_up(config) else card.vocab_size,
        by_priority=config.scheduler_config.policy == "priority",
        sleeps=bool(config.model_config.enable_sleep_mode),
        lora=config.lora_config,
        grammars=GrammarCounter(),
        media=media,
        tickets=tickets,
    )
