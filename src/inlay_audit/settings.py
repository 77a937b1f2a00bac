"""The settings of `inlay embeds audit`."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, SecretStr


class AuditSettings(BaseModel, frozen=True, defer_build=True):
    """`inlay embeds audit`."""

    model: str = Field(title="Texts")
    """Directory of the model that rows are for, or its name on the hub. Only the tokenizer and the
    embedding table are read."""
    texts: Path = Field(title="Texts")
    """File of texts, one a line, or a JSON object a line: text and, where known, names and others,
    entities that stand in it, and the right answer. - is standard input."""
    public: Path | None = Field(default=None, title="Texts")
    """File of texts that attackers know, as --texts. Unless set, they know two thirds of --texts,
    and the last third is read."""
    plain: bool = Field(default=False, title="Texts")
    """A text is a whole prompt, not a user's message in the model's chat template."""
    transform: list[str] = Field(default=[], title="Attack")
    """Transforms of the table's rows before they are sent, each audited: none, noise:LEVEL (in
    units of the median norm; noise:1.5x: in the unit that the report names, which compares across
    models), shuffle, permute, rotate, permute:folded, rotate:folded,
    project:WIDTH, drop:SHARE, hidden:LAYER, learned, or MODULE:FUNCTION of Python. none,
    noise:1, noise:4, rotate and shuffle unless set."""
    transform_command: list[str] = Field(default=[], title="Attack")
    """Command that reads rows as safetensors on standard input and writes those to send on its
    output; audited too."""
    rows: Path | None = Field(default=None, title="Attack")
    """Safetensors file of rows that were made of --texts; audited too."""
    attackers: list[str] = Field(default=[], title="Attack")
    """Attackers to try; all of them unless set: nearest, whitened, signature, gram, sorted,
    codebook, procrustes, ridge, least-squares, bigram, resends, resends-pairs, reordered, and with
    torch inverter, context, beam and hidden-search; the last three of a directory with at most
    4 GiB of weights. fast is all but those with torch. Guesses without the rows are always beside
    them."""
    resends: int = Field(default=8, ge=1, le=64, title="Attack")
    """Times that a text is sent, as chats send their history: new noise averages out."""
    budget: float | None = Field(default=None, gt=0, title="Attack")
    """Seconds for a transform. The attacker that runs then is stopped at its next batch of rows,
    and what it has read counts; no other begins. The verdict names them. The cheap ones come
    first. All run to the end unless set."""
    most_texts: int | None = Field(default=None, ge=20, title="Texts")
    """Texts that are read at most, drawn at random; intervals get wider. All unless set, but 60 (or
    least-texts) of a vocabulary over 32,768 tokens: time grows with texts times vocabulary times
    width."""
    dtype: Literal["float32", "float16", "bfloat16"] = Field(default="float32", title="Attack")
    """Type of the numbers of rows as they are sent; attackers get them as they arrive."""
    seed: int = Field(default=0, ge=0, title="Attack")
    """Seed of keys and noise."""
    answers: bool = Field(default=False, title="Answers")
    """Compare the model's answers to the same rows with those to the table's own, computed here
    with torch, and how far their distributions drift."""
    url: str | None = Field(default=None, title="Answers")
    """Base URL of a server of the model, as OpenAI clients take it. Its answers to the same rows
    are compared with those to the table's own."""
    api_key: SecretStr | None = Field(default=None, title="Answers")
    """Key to ask with."""
    model_name: str | None = Field(default=None, title="Answers")
    """Name of the model at the server; its first one unless set."""
    fail_above: list[str] = Field(default=[], title="Report")
    """Exit with status 1 where the upper limit of the worst case is above a share: METRIC=SHARE,
    with a metric of tokens, any-order, names, others, unseen, exact."""
    thresholds: Path | None = Field(default=None, title="Report")
    """Gate in a YAML or JSON file: fail-above (metrics with their shares), answers-kept-at-least,
    least-texts, attackers-required. The exit status is 1 where a bound is passed, 2 where one
    cannot be judged, as when a required attacker did not run."""
    compare: list[Path] = Field(default=[], title="Report")
    """Earlier reports (-o json), of this model or of others, to show beside this one."""
    report: Path | None = Field(default=None, title="Report")
    """Write a report that can be kept, one HTML file: verdicts, who knew what, figures, and what is
    not covered. It holds no text of --texts."""
    svg: Path | None = Field(default=None, title="Report")
    """Write the shares as a picture (SVG) too."""
    output_format: Literal["text", "json"] = Field(default="text", title="Report")
    """Print text for people, or JSON for programs on standard output."""
