"""Limits of the engine: length of a sequence, size of a step, number of pages."""

from bisect import bisect_right
from dataclasses import dataclass

from inlay.engine.torch.cache.page_groups import first_page, most_pages, pages_for
from inlay.errors import ContextLengthError, InvalidRequestError
from inlay.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits of the engine.

    Attributes:
        max_model_len: maximum number of positions of one sequence, prompt and output together.
        max_num_seqs: maximum number of sequences in one step.
        max_num_batched_tokens: maximum number of positions in one step.
        page_size: positions in a page, a multiple of `inlay.digest.BLOCK_SIZE`.
        num_pages: total number of pages, shared by all page groups.
        windows: window of each page group, None for full attention; `Core` takes them from its
            model.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    page_size: int
    num_pages: int
    windows: tuple[int | None, ...] = (None,)

    def pages_for(self, positions: int) -> int:
        """Return the number of pages of one group that hold the first `positions`."""
        return pages_for(positions, self.page_size)

    def first_page(self, group: int, computed: int) -> int:
        """Return the index of the first page in `group` needed after `computed` positions."""
        return first_page(self.windows[group], computed, self.page_size)

    def most_pages(self, length: int, chunk: int) -> int:
        """Return the maximum number of pages of all groups that a sequence holds.

        It has `length` positions and is computed by at most `chunk` of them per step.
        """
        return sum(most_pages(window, length, chunk, self.page_size) for window in self.windows)

    def pages_missing(self, computed: int, length: int) -> int:
        """Return an upper bound of the pages to allocate from `computed` to `length` positions."""
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
        """Refuse a request that could never run, however long it waited.

        Raises:
            ContextLengthError: prompt and output exceed the model or the pages.
            InvalidRequestError: an empty prompt, or a segment that may not be split exceeds a step.
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
