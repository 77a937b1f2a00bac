"""Python calls and CPU time of a decode step of the torch engine, on the bundled model."""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from benchmarks._house_trace import MODEL, ROOT
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.loading import draft_source_of, speculator_of
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.step import Core
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling

SETTLE, STEPS, MANY = 12, 20, 32
"""Steps before counting; steps that are counted; sequences of a batch."""

SOURCE = str(ROOT / "src")


class StepCalls(NamedTuple):
    """Calls of a step: of one sequence alone, and of each further one."""

    one: float
    further: float


class StepTime(NamedTuple):
    """CPU milliseconds of a step, and the part of them outside of the model and its logits."""

    milliseconds: float
    host: float


def loaded() -> CausalModel:
    """Load the bundled model, with one thread."""
    return CausalModel.load(EngineSettings.of(model=str(MODEL), device="cpu", num_threads=1))


def calls(model: CausalModel, *, drafts: bool) -> StepCalls:
    """Count the Python calls of a decode step."""
    one, many = (_count(_deciding(model, count, drafts=drafts)) for count in (1, MANY))
    return StepCalls(one, (many - one) / (MANY - 1))


def times(model: CausalModel, sequences: int) -> StepTime:
    """CPU time of a decode step, the least of six."""
    core = _deciding(model, sequences, drafts=False)
    inside = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                inside += time.thread_time() - began

        return run

    own = {name: getattr(model, name) for name in ("hidden", "logits")}
    for name, function in own.items():
        setattr(model, name, timed(function))
    found: list[StepTime] = []
    try:
        for _ in range(6):
            inside, began = 0.0, time.thread_time()
            core.step()
            took = time.thread_time() - began
            found.append(StepTime(took * 1000, (took - inside) / took))
    finally:
        for name in own:
            delattr(model, name)
        core.close()
    return min(found)


def _deciding(model: CausalModel, sequences: int, *, drafts: bool) -> Core:
    """Return an engine that decodes so many sequences, and has settled."""
    limits = EngineLimits(
        num_pages=sequences * 16,
        page_size=16,
        max_num_seqs=sequences,
        max_num_batched_tokens=2048,
        max_model_len=256,
    )
    speculator = None
    if drafts:
        config = SpeculativeConfig.model_validate({"method": "ngram"})
        settings = EngineSettings.of(model=str(MODEL), device="cpu", num_threads=1)
        speculator = speculator_of(config, draft_source_of(settings, config, model), limits, model)
        if speculator is None:
            raise RuntimeError("nothing drafts")
        # The same drafts, however long steps take here: all that are found pay.
        vars(speculator)["timed"] = partial(_timed, speculator.timed)
    core = Core(model, limits, Secret.random(), prefix_caching=False, speculator=speculator)
    sampling = Sampling(max_tokens=200, temperature=0.0, ignore_eos=True)
    for number in range(sequences):
        ids = Tokens([(number * 37 + place * 13) % model.vocab_size for place in range(8)])
        core.admit(Request(id=str(number), prompts=(Prompt.of(ids),), params=sampling))
    for _ in range(SETTLE):
        core.step()
    return core


def _timed(
    learn: Callable[[Iterable[ScheduledChunk], float], None],
    chunks: Iterable[ScheduledChunk],
    _: float,
) -> None:
    learn(chunks, 0.001)


def _count(core: Core) -> float:
    found = 0

    def seen(frame: Any, event: str, _: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

    before = sys.getprofile()
    sys.setprofile(seen)
    for _ in range(STEPS):
        core.step()
    sys.setprofile(before)
    core.close()
    return found / STEPS
