"""Construction of a torch engine from its settings: core, metadata, request checks."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from inlay import __version__
from inlay.base.errors import EngineError
from inlay.engine.admission import Admission
from inlay.engine.sections import ComputeOptions, LimitOptions
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import SpeculativeConfig, speculative_config
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.kv_layout import (
    EngineLimits,
    available_memory,
    num_pages,
    pages_for,
    share_of_gpu,
)
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.cache_events import CacheEventQueue
from inlay.engine.torch.decode_graphs import GRAPHS, CudaCapture
from inlay.engine.torch.grammar.grammars import KINDS
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.needs import Need
from inlay.engine.torch.pages.copying import PageSealer
from inlay.engine.torch.pages.disk import DiskPages
from inlay.engine.torch.pages.exchange import AskCore, PageExchange
from inlay.engine.torch.pages.host_memory import HostPages
from inlay.engine.torch.pages.tiers import PageTiers
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.speculation.draft_head import DraftHead, HeadDrafter
from inlay.engine.torch.speculation.draft_model import DraftModel, check_draft_model
from inlay.engine.torch.speculation.eagle import load_eagle
from inlay.engine.torch.speculation.mtp import load_mtp
from inlay.engine.torch.speculation.ngram import NgramDrafter
from inlay.engine.torch.step import Core
from inlay.engine.weights import directory_of, weights_form
from inlay.messages.card import Exactness, Limits, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.prompt import Tokens
from inlay.messages.request import Task

_logger = logging.getLogger(__name__)

_LEAST_POSITIONS, _MOST_POSITIONS = 64, 512
"""Positions of prompts in a step on a CPU: fewer read all weights too often, more are no faster."""

_STEP_WEIGHTS = 1 << 35
"""Weights times positions of a step that take a thread about 0.4 s."""


def usual_positions(layers: int, hidden_size: int, threads: int) -> int:
    """Return the positions of prompts in a step on a CPU, which whoever comes meanwhile waits for.

    A power of two, by the model's size alone: steps that were cut by the clock would round
    otherwise from one run to the next. A layer has about 12 `hidden_size` squared weights
    (arXiv 2001.08361, 2.1).
    """
    fit = max(1, _STEP_WEIGHTS * threads // (12 * max(layers, 1) * hidden_size**2))
    return min(max(1 << fit.bit_length() - 1, _LEAST_POSITIONS), _MOST_POSITIONS)


def core_of(
    settings: EngineSettings,
    model: CausalModel,
    secret: Secret,
    events: CacheEventQueue,
    *,
    num_blocks: int | None = None,
    ask: Callable[[str, Need], object] | None = None,
) -> Core:
    """Allocate the pages of `model` and build its core.

    Args:
        settings: settings of the engine.
        model: the loaded model.
        secret: key of the digests.
        events: records changes of the prefix cache.
        num_blocks: number of pages; computed from settings and memory unless given.
        ask: as for `Core`.

    Raises:
        InvalidRequestError: the configured cache does not hold one sequence.
        EngineError: there is not enough memory; in mode strict, graphs differ.
    """
    settings = _with_room_for_states(settings, model)
    on_gpu = model.device.type == "cuda"
    overlap = (
        on_gpu if settings.compute.async_scheduling is None else settings.compute.async_scheduling
    )
    speculation = speculative_config(settings)
    if speculation is None and not overlap:
        speculation = SpeculativeConfig(method="ngram")
    source = None if speculation is None else draft_source_of(settings, speculation, model)
    if num_blocks is None:
        num_blocks = num_pages(
            settings,
            page_bytes=model.page_bytes(settings.cache.block_size)
            + draft_page_bytes(source, model, settings.cache.block_size),
            windows=model.windows,
            max_model_len=model.max_model_len,
            available=available_memory(model.device),
            asked=share_of_gpu(settings.cache, model.device, peak_activations(model, settings))
            if on_gpu and settings.cache.kv_cache_memory_bytes is None
            else None,
        )
    bounds = EngineLimits(
        max_model_len=model.max_model_len,
        max_num_seqs=settings.batch.max_num_seqs,
        max_num_batched_tokens=settings.batch.max_num_batched_tokens,
        page_size=settings.cache.block_size,
        num_pages=num_blocks,
        usual_positions=None
        if on_gpu or "max_num_batched_tokens" in settings.batch.model_fields_set
        else usual_positions(len(model.layers), model.hidden_size, torch.get_num_threads()),
    )
    core = Core(
        model,
        bounds,
        secret,
        prefix_caching=settings.cache.enable_prefix_caching,
        capture=CudaCapture()
        if on_gpu and captures(settings.compute, model, speculation)
        else None,
        events=events,
        overlap=overlap,
        max_cpu_loras=settings.cpu_loras,
        ask=ask,
        speculator=speculator_of(speculation, source, bounds, model),
    )
    check = model.self_check
    if settings.health.self_check == "strict" and check is not None and GRAPHS in check.left_out:
        raise EngineError(
            "--self-check strict: decoding by CUDA graphs differs; --enforce-eager does without"
        )
    return core


def _with_room_for_states(settings: EngineSettings, model: CausalModel) -> EngineSettings:
    """Return `settings` with pages that hold the states of recurrent layers."""
    size = max(settings.cache.block_size, model.least_page_size)
    if size > settings.cache.block_size:
        _logger.info(
            "pages have %d positions, not %d: each holds the state of a recurrent layer",
            size,
            settings.cache.block_size,
        )
    return settings.replace(block_size=size)


def captures(
    options: ComputeOptions, model: CausalModel, speculation: SpeculativeConfig | None
) -> bool:
    """Return True if decode steps are captured on a GPU.

    A captured step would have to be replayed by every rank, and gives a head no hidden states.
    """
    reads_states = speculation is not None and speculation.reads_states
    return not (options.enforce_eager or model.group is not None or reads_states)


def draft_source_of(
    settings: EngineSettings, speculation: SpeculativeConfig, model: CausalModel
) -> CausalModel | DraftHead | None:
    """Load the model or the head that drafts tokens for `model`, if one does.

    Raises:
        InvalidRequestError: it cannot be loaded, or does not go with `model`.
    """
    if speculation.method == "mtp":
        return load_mtp(model)
    if speculation.model is None:
        return None
    if speculation.method == "eagle3":
        return load_eagle(directory_of(speculation.model, speculation.revision), model)
    draft = CausalModel.load(
        EngineSettings.of(
            model=speculation.model,
            revision=speculation.revision,
            dtype=settings.model.dtype,
            device=settings.model.device,
            num_threads=settings.devices.num_threads,
            self_check=settings.health.self_check,
        )
    )
    check_draft_model(draft, model)
    return draft


def draft_page_bytes(
    source: CausalModel | DraftHead | None, model: CausalModel, page_size: int
) -> int:
    """Return the bytes of a page of what drafts tokens for `model`."""
    if source is None or isinstance(source, CausalModel):
        return 0 if source is None else source.page_bytes(page_size)
    return source.shape.elements * page_size * model.dtype.itemsize


def speculator_of(
    speculation: SpeculativeConfig | None,
    source: CausalModel | DraftHead | None,
    bounds: EngineLimits,
    model: CausalModel,
) -> Speculator | None:
    """Return the speculator of a core within `bounds`; None if none is set."""
    if speculation is None or speculation.method == "none":
        return None
    most, size = speculation.num_speculative_tokens, bounds.page_size
    if source is None:
        drafter = NgramDrafter(speculation) if speculation.method == "ngram" else None
        return Speculator(drafter, most)
    if isinstance(source, CausalModel):
        group = model.windows.index(None)
        return Speculator(DraftModel(source, bounds.num_pages, size, model.vocab_size, group), most)
    head = HeadDrafter(source, model, bounds.num_pages, size)
    return Speculator(head, most, head)


def largest_step(model: CausalModel, settings: EngineSettings) -> tuple[Batch, Pages]:
    """Return a batch of as many positions and sampled ones as a step may have, and its pages."""
    size = settings.cache.block_size
    count = min(settings.batch.max_num_batched_tokens, model.max_model_len)
    each = pages_for(count, size)
    runs = [
        PageRun(range(1 + group * each, 1 + (group + 1) * each))
        for group in range(len(model.page_groups))
    ]
    tokens = [(0, Tokens([0] * count))]
    item = BatchItem(tokens, 0, count, runs, min(count, settings.batch.max_num_seqs))
    return Batch.pack([item], size), model.new_pages(each * len(runs), size)


def peak_activations(model: CausalModel, settings: EngineSettings) -> int:
    """Return the bytes that the largest step takes on a GPU beside weights and pages; runs it."""
    batch, pages = largest_step(model, settings)
    torch.cuda.synchronize(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.forward(batch, pages)
    torch.cuda.synchronize(model.device)
    peak: int = torch.cuda.max_memory_allocated(model.device)
    model.forget_workspace()
    return peak - before


def exchange_of(
    settings: EngineSettings, core: Core, secret: Secret, ask: AskCore, host_memory: int | None
) -> PageExchange:
    """Return what brings pages to `core`, with the tiers that keep what its cache evicts.

    Args:
        settings: settings of the engine.
        core: core of the engine.
        secret: key of the pages' checksums.
        ask: reaches the core.
        host_memory: descriptor of memory lent to the engine, or None.

    Raises:
        EngineError: there is not enough memory.
        InvalidRequestError: the directory cannot be used.
    """
    sealer = PageSealer(core.cached.copier.shape, secret)
    host = disk = None
    if settings.kv.kv_offloading_size is not None:
        if host_memory is None:
            raise EngineError("no host memory was lent to the engine for --kv-offloading-size")
        status = os.fstat(host_memory)
        needed = status.st_size - 512 * status.st_blocks
        if needed > (free := available_memory(torch.device("cpu"))):
            raise EngineError(
                f"--kv-offloading-size asks for {needed} bytes of host memory more, {free} are "
                "available: lower it"
            )
        host = HostPages(sealer.shape, host_memory)
    if settings.kv.kv_offloading_dir is not None:
        path = settings.kv.kv_offloading_dir
        if settings.devices.data_parallel_rank is not None:
            path /= f"rank-{settings.devices.data_parallel_rank}"
        size = int(settings.kv.kv_offloading_disk_size * 1024**3)
        disk = DiskPages(sealer.shape, secret, path, size)
    tiers = PageTiers(sealer, host, disk) if settings.keeps_evicted_kv else None
    return PageExchange(ask, sealer, tiers, gives=settings.exchanges_pages)


def admission_of(
    options: LimitOptions, core: Core, encoder: TowerEncoder | None = None
) -> Admission:
    """Return the checks of requests for `core`, whose images `encoder` encodes."""
    model = core.model
    return Admission(
        bounds=core.bounds,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        dtype=core.dtype,
        max_logprobs=options.most_logprobs(model.vocab_size),
        refuses_rows=model.refuses_rows,
        grammars=KINDS,
        adapters=core.adapters,
        hidden_layers=len(model.decoder_layers) or None,
        projected_size=None if model.projector is None else model.projector.size,
        media=None if encoder is None else encoder.spec,
    )


def card_of(
    settings: EngineSettings, core: Core, secret: Secret, encoder: TowerEncoder | None = None
) -> ModelCard:
    """Return the metadata of an engine around `core`, whose images `encoder` encodes."""
    model, bounds = core.model, core.bounds
    names = settings.model.names
    max_abs = settings.limits.max_prompt_embeds_abs
    features = ("greedy", "sampling", "penalties", "logprobs", "grammar", "hidden_states")
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=model.path,
        weights_id=model.weights_id,
        weights_form=weights_form(Path(model.path), core.dtype, model.activations),
        dtype=core.dtype,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        limits=Limits(
            max_model_len=bounds.max_model_len,
            max_num_seqs=bounds.max_num_seqs,
            max_logprobs=settings.limits.most_logprobs(model.vocab_size),
            max_prompt_embeds_abs=100 * model.embedding_abs_max if max_abs is None else max_abs,
        ),
        engine="torch",
        engine_version=__version__,
        tasks=(
            (Task.GENERATE, Task.ENCODE)
            if encoder is not None and encoder.is_local
            else (Task.GENERATE,)
        ),
        embedding_table_id=model.embedding_table_id,
        embedding_abs_max=model.embedding_abs_max,
        prompt_embeds=model.refuses_rows,
        block_size=bounds.page_size,
        kv_layout=(core.cached.copier.shape.layout if settings.exchanges_pages else ""),
        phase=settings.kv.role,
        num_blocks=bounds.num_pages,
        eos_token_ids=model.eos_token_ids,
        default_sampling=model.default_sampling,
        resuming=dict.fromkeys(
            features,
            Exactness.EXACT if model.batch_invariant else Exactness.of_dtype(core.dtype),
        ),
        grammars=KINDS,
        shares_text_prefix=True,
        hidden_layers=len(model.decoder_layers) or None,
        projected_size=None if model.projector is None else model.projector.size,
        secret_fingerprint=secret.fingerprint,
        self_check=model.self_check if encoder is None else encoder.self_check,
        media=None if encoder is None else encoder.spec,
    )
