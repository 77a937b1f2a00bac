"""What fits into the engine at all."""

from bisect import bisect_right
from dataclasses import dataclass

from inlay.engine.torch.cache.page_groups import first_page, most_pages, pages_for
from inlay.errors import ContextLengthError, InvalidRequestError
from inlay.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What fits into the engine at all.

    Attributes:
        max_model_len: positions of one sequence, prompt and output together.
        max_num_seqs: sequences in one step.
        max_num_batched_tokens: positions in one step.
        page_size: positions in a page, a multiple of `inlay.digest.BLOCK_SIZE`.
        num_pages: pages there are, for all page groups.
        windows: of each page group, None where all positions are kept; `Core` takes them from its
            model.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    windows: tuple[int | None, ...] = (None,)

    def pages_for(self, positions: int) -> int:
        """Pages of one group that hold the first `positions`."""
        return pages_for(positions, self.page_size)

    def first_page(self, group: int, computed: int) -> int:
        """Index of the first page in `group` that a sequence still needs once `computed` positions are."""
        return first_page(self.windows[group], computed, self.page_size)

    def most_pages(self, length: int, chunk: int) -> int:
        """Pages of all groups that a sequence of `length` positions holds at most, computed by `chunk` or fewer a step."""
        return sum(most_pages(window, length, chunk, self.page_size) for window in self.windows)

    def pages_missing(self, computed: int, length: int) -> int:
        """Pages that a sequence of which `computed` positions have theirs still takes until `length` are, at most."""
        end, have = self.pages_for(length), self.pages_for(computed)
        total = 0
        for group, window in enumerate(self.windows):
            most = end
            if window is not None:
                most = most_pages(window, length, self.max_num_batched_tokens, self.page_size)
                most = min(end, self.first_page(group, computed) + most)
            total += most - have
        return total

    def check(self, request: Request) -> None:
        """Refuse what could never run, however long it waited.

        Raises:
            ContextLengthError: prompt and output are longer than the model or the pages can take.
            InvalidRequestError: nothing to start from, or a segment that may not be split is larger
                than a step.
        """
        prompt = len(request.prompt)
        if not prompt:
            raise InvalidRequestError(
                "a prompt needs at least one position, got none", param="prompt"
            )
        total = prompt + request.sampling.max_tokens
        atomic = request.prompt.atomic_bounds()
        chunk = max((stop - start for start, stop in atomic), default=1)
        if total > self.max_model_len or self.most_pages(total, chunk) > self.num_pages:
            lengths = range(self.max_model_len + 1)
            limit = (
                bisect_right(
                    lengths, self.num_pages, key=lambda length: self.most_pages(length, chunk)
                )
                - 1
            )
            raise ContextLengthError(
                f"the maximum context length is {limit} positions; got a prompt of {prompt} and "
                f"max_tokens of {request.sampling.max_tokens}, together {total}"
            )
        for start, stop in atomic:
            if stop - start > self.max_num_batched_tokens:
                raise InvalidRequestError(
                    f"positions {start} to {stop} must be computed in one step of at most "
                    f"{self.max_num_batched_tokens} positions, and are {stop - start}"
                )


__all__ = ["EngineLimits"]
