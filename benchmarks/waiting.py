"""Time of the scheduler's part of a step while many sequences wait for pages.

One sequence decodes whose long prompt is cached. Others wait with that prompt and pages of their
own beside it, of which there are too few. They are of as many clients, or all of one. The first
step looks every page up, and is shown apart.

    python -m benchmarks.waiting [--waiting 63] [--cached 32768] [--steps 200]
"""

import statistics
import time

from benchmarks._options import parser_of
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.scheduler import Scheduler
from inlay.engine.torch.sequence import Sequence
from inlay.messages.digest import Chain, Secret, root_digest
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling

PAGE = 16
OWN = 301
"""Pages that each of the waiting has beside the common prompt."""
SECRET = Secret(bytes(32))


def sequence(number: int, common: Tokens, own: int, client: str) -> Sequence:
    """Make a sequence of the common prompt and `own` positions more."""
    prompt = Prompt.of(common, Tokens([number] * own))
    sampling = Sampling(max_tokens=4096, ignore_eos=True)
    request = Request(id=str(number), prompts=(prompt,), params=sampling, client=client)
    root = root_digest(SECRET, weights_id="w", dtype="float32", salt=None, adapter=None)
    return Sequence(request, arrival=number, chain=Chain(root, SECRET))


def step(scheduler: Scheduler) -> float:
    """Milliseconds of planning a step, which is then done with."""
    began = time.perf_counter()
    plan = scheduler.schedule()
    took = time.perf_counter() - began
    for chunk in plan.chunks:
        if chunk.samples:
            scheduler.mark_verified(chunk)
        scheduler.commit(chunk)
        if chunk.samples:
            chunk.sequence.append(1)
    return took * 1000


def measure(waiting: int, cached: int, steps: int, clients: int) -> tuple[float, list[float]]:
    """Milliseconds of the first step, and of each of those after it."""
    limits = EngineLimits(
        max_model_len=2 * cached, max_num_seqs=64, max_num_batched_tokens=cached, page_size=PAGE,
        num_pages=cached // PAGE + OWN,
    )  # fmt: skip
    scheduler = Scheduler(limits)
    common = Tokens([number % 997 for number in range(cached)])
    scheduler.admit(sequence(0, common, 10 * PAGE, "runs"))
    while scheduler.running == [] or scheduler.running[0].num_pending_tokens > 1:
        step(scheduler)
    for number in range(1, waiting + 1):
        scheduler.admit(sequence(number, common, OWN * PAGE, f"client-{number % clients}"))
    first = step(scheduler)
    return first, [step(scheduler) for _ in range(steps)]


def main() -> None:
    """Print a line for each number of clients."""
    parser = parser_of(__doc__)
    parser.add_argument("--waiting", type=int, default=63)
    parser.add_argument("--cached", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    for clients in (given.waiting, 1):
        first, rest = measure(given.waiting, given.cached, given.steps, clients)
        print(
            f"{clients:>3} clients: first {first:6.1f} ms, then median "
            f"{statistics.median(rest):5.2f} ms, longest {max(rest):5.2f} ms"
        )


if __name__ == "__main__":
    main()
