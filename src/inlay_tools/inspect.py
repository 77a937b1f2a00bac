"""`inlay embeds inspect`: what a file of embeddings holds, row by row."""

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from inlay.cli.process import Console
from inlay.client import EmbeddedPrompt, Neighbour, PromptEmbedder, loads, nearest
from inlay.client.prompts import Array, naming
from inlay_tools.files import named, read
from inlay_tools.settings import InspectSettings


def run(settings: InspectSettings) -> int:
    """Write what the file holds; the exit status.

    Raises:
        FileError: the file cannot be read.
        InvalidRequestError: it is not embeddings, or not of the model's hidden size.
    """
    data = read(settings.file)
    with naming(named(settings.file)):
        prompts = loads(data)
    embedder = (
        PromptEmbedder.from_pretrained(settings.model) if settings.model is not None else None
    )
    if settings.output_format == "json":
        found = [as_data(prompt, embedder, settings.top) for prompt in prompts]
        Console(sys.stdout, sys.stderr).out(msgspec.json.encode(found).decode() + "\n")
        return 0
    lines: list[str] = []
    for index, prompt in enumerate(prompts):
        if len(prompts) > 1:
            lines.append(f"prompt {index}")
        lines += described(prompt, embedder, settings.top)
    Console(sys.stdout, sys.stderr).out("\n".join(lines) + "\n")
    return 0


def described(prompt: EmbeddedPrompt, embedder: PromptEmbedder | None, top: int) -> Iterator[str]:
    """Lines about the rows of a prompt.

    Raises:
        InvalidRequestError: the rows are not of the model's hidden size.
    """
    wide = prompt.rows.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1)
    finite = np.isfinite(norms)
    yield f"shape   {prompt.num_tokens} rows of {prompt.hidden_size}"
    yield f"dtype   {prompt.rows.dtype}"
    if finite.any():
        low, middle, high = np.quantile(norms[finite], [0, 0.5, 1])
        yield f"norms   {low:.4g} to {high:.4g}, median {middle:.4g}"
    if not finite.all():
        bad = int((~finite).sum())
        yield f"finite  no: {bad} rows hold NaN or infinity, which a server refuses"
    if embedder is None:
        yield f"table   {prompt.table_id or 'not stamped'}"
        return
    yield f"table   {_table(prompt, embedder)}"
    found = nearest(prompt.rows[finite], embedder.table, top)
    exact = sum(row[0].exact for row in found)
    yield f"exact   {exact} of {prompt.num_tokens} rows are the table's own"
    yield ""
    yield f"{'row':>5}  {'norm':>10}  nearest tokens: id, text, L2 distance, cosine"
    yield from _rows(norms, finite, found, embedder)


def as_data(prompt: EmbeddedPrompt, embedder: PromptEmbedder | None, top: int) -> dict[str, Any]:
    """The same as `described`, for programs; a norm that is not finite is None.

    Raises:
        InvalidRequestError: the rows are not of the model's hidden size.
    """
    norms = np.linalg.norm(prompt.rows.astype(np.float64), axis=1)
    finite = np.isfinite(norms)
    rows: list[dict[str, Any]] = [
        {"norm": float(norm) if good else None} for norm, good in zip(norms, finite, strict=True)
    ]
    if embedder is not None:
        near = nearest(prompt.rows[finite], embedder.table, top)
        for index, neighbours in zip(np.flatnonzero(finite), near, strict=True):
            rows[index]["nearest"] = [
                {
                    "token_id": each.token_id,
                    "text": embedder.renderer.decode((each.token_id,), skip_special_tokens=False),
                    "distance": each.distance,
                    "cosine": each.cosine,
                    "exact": each.exact,
                }
                for each in neighbours
            ]
    return {
        "num_tokens": prompt.num_tokens,
        "hidden_size": prompt.hidden_size,
        "dtype": str(prompt.rows.dtype),
        "table_id": prompt.table_id,
        "model_table_id": None if embedder is None else embedder.table.id,
        "rows": rows,
    }


def _rows(
    norms: Array, finite: Array, found: list[list[Neighbour]], embedder: PromptEmbedder
) -> Iterator[str]:
    neighbours = iter(found)
    for index, norm in enumerate(norms):
        head = f"{index:>5}  {norm:>10.4g}  "
        if not finite[index]:
            yield f"{head}not finite"
            continue
        for neighbour in next(neighbours):
            text = repr(embedder.renderer.decode((neighbour.token_id,), skip_special_tokens=False))
            mark = "  exact" if neighbour.exact else ""
            yield (
                f"{head}{neighbour.token_id:>7}  {text:<16}  {neighbour.distance:>9.4g}  "
                f"{neighbour.cosine:>7.4f}{mark}"
            )
            head = " " * len(head)


def _table(prompt: EmbeddedPrompt, embedder: PromptEmbedder) -> str:
    table = embedder.table
    own, blocks = table.id, "" if table.stored_as == table.dtype else f" ({table.stored_as})"
    if prompt.table_id is None:
        return f"not stamped; the model's is {own}{blocks}"
    if prompt.table_id == own:
        return f"{own}, the model's{blocks}"
    return f"{prompt.table_id}, but the model's is {own}{blocks}: made for another model"
