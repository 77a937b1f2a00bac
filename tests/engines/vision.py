"""An engine with a tower of its own, asked with prompts of images, rows and texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inlay.media.embeds import embeds_segments
from inlay.media.spec import MediaSpec, layout
from inlay.messages.digest import with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Segment, Tokens
from inlay.tensors import Tensor
from tests.engine.conformance import Receiver, make_request, run
from tests.engine.reference import rows_of as as_rows
from tests.engine.torch.vision_reference import Picture
from tests.engines import images
from tests.engines.images import Parts
from tests.engines.starting import SECRET

NEW = 12
ONE, TWO = Picture(1, 40, 56), Picture(2, 70, 33)

PROMPTS: dict[str, Parts] = {
    "text": [[40, 41, 42, 43, 44, 45, 46, 47, 48]],
    "one": [[5, 6, 9, 10], ONE, list(range(60, 100))],
    "other": [[5, 6, 9, 10], ONE, [90, 91, 92]],
    "both": [list(range(100, 117)), ONE, [11, 12, 13, 14, 15], TWO, [20, 21, 22]],
    "twice": [[6, 7, 8], TWO, [90, 91, 92], TWO, [93]],
}


class Vision:
    """An engine with a model that takes images."""

    def __init__(self, engine: Any, directory: Path, processing: Mapping[str, Any]) -> None:
        self.engine = engine
        self.processing = processing
        self.directory = directory
        spec = engine.card.media
        assert spec is not None
        self.spec: MediaSpec = spec
        self.block: int = engine.card.block_size

    def prompt(self, parts: Parts, **more: Any) -> Prompt:
        return images.prompt_of(self.spec, parts, **more)

    def wanted(self, parts: Parts) -> list[int]:
        return images.greedy(self.directory, self.spec, parts, NEW, self.processing)

    def embeds(self, picture: Picture) -> list[Segment]:
        """The segments of an image that a client encoded."""
        rows, _ = images.rows_of(self.directory, picture, self.processing)
        tensor = Tensor(Buffer(rows.numpy().tobytes()), "float32", tuple(rows.shape), "npy")
        hidden = self.engine.card.hidden_size
        grid = layout(self.spec, picture.height, picture.width).given_grid
        return embeds_segments(self.spec, tensor, grid=grid, hidden_size=hidden, dtype="float32")

    @property
    def takes_embeds(self) -> bool:
        """True if images of this model may come as rows that a client made."""
        return self.engine.card.prompt_embeds is None

    def rows(self, ids: list[int]) -> Rows:
        return as_rows(images.looked_up(self.directory, ids))

    def whole(self, prompt: Prompt) -> int:
        """Positions that are found again: the last one is computed anew, and with it its block."""
        return (len(prompt) - 1) // self.block * self.block

    async def ask(self, prompt: Prompt, name: str = "a", **more: Any) -> Receiver:
        (found,) = await run(self.engine, make_request(name, prompt, NEW, **more))
        return found


async def prompts_continue_as_transformers_does(vision: Vision) -> None:
    """Each of `PROMPTS` alone, and all of them together."""
    wanted = {name: vision.wanted(parts) for name, parts in PROMPTS.items()}
    requests = [make_request(name, vision.prompt(parts), NEW) for name, parts in PROMPTS.items()]
    for request in requests:
        (alone,) = await run(vision.engine, request)
        assert alone.output == wanted[request.id]
    await vision.engine.reset_prefix_cache()
    found = await run(vision.engine, *requests)
    assert {one.request.id: one.output for one in found} == wanted
    assert wanted["one"] != wanted["other"]


async def mixtures_continue_as_transformers_does(vision: Vision) -> None:
    """Rows of a client's own encoder, other rows and files in one prompt, all of them together."""
    words, more = list(range(100, 117)), [21, 22, 23, 24, 25]
    mixtures = {
        "embeds": Prompt.of(Tokens(words), *vision.embeds(ONE), Tokens(more)),
        "a file, then embeds": Prompt.of(
            *vision.prompt([words, TWO, more]).segments, *vision.embeds(ONE), Tokens(more)
        ),
        "rows around a file": Prompt.of(
            vision.rows(words), *vision.prompt([ONE]).segments, vision.rows(more)
        ),
        "all of them": Prompt.of(
            Tokens(words[:3]),
            vision.rows(words[3:]),
            *vision.embeds(TWO),
            vision.rows(more),
            *vision.prompt([ONE]).segments,
            Tokens(more),
        ),
        "rows alone": Prompt.of(vision.rows([*words, *more])),
    }
    wanted: dict[str, Parts] = {
        "embeds": [words, ONE, more],
        "a file, then embeds": [words, TWO, more, ONE, more],
        "rows around a file": [words, ONE, more],
        "all of them": [words, TWO, more, ONE, more],
        "rows alone": [[*words, *more]],
    }
    found = await run(
        vision.engine,
        *(make_request(name, with_digests(each, SECRET), NEW) for name, each in mixtures.items()),
    )
    assert {one.request.id: one.output for one in found} == {
        name: vision.wanted(parts) for name, parts in wanted.items()
    }
