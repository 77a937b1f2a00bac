"""Pictures of handwritten digits in six colours, and the digits kept out of training.

The digits are those of scikit-learn's `load_digits`: the test part of "Optical Recognition of
Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine Learning Repository, CC BY 4.0).
"""

from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo

COLOURS = {
    "red": (220, 20, 20),
    "green": (20, 160, 40),
    "blue": (30, 60, 230),
    "orange": (250, 150, 0),
    "purple": (150, 30, 190),
    "black": (0, 0, 0),
}
SIDE = 16
"""Pixels of a picture's side."""

PATCH = 4
"""Pixels of a patch's side; a patch is a row."""

STROKES = 8
"""Cells of a digit's side, each of 0 to `MOST`."""

MOST = 16
HELD_OUT = 360
"""Digits that are only measured by: every fifth."""

_SHADE = 15
"""Grey of one unit of ink in that sheet."""

_ROW = 30
"""Digits in a row of the sheet of digits that were held out."""


class Digits(NamedTuple):
    """Handwritten digits.

    Attributes:
        cells: uint8 [N, STROKES, STROKES], ink of 0 to `MOST`.
        labels: int64 [N], 0 to 9.
    """

    cells: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def load_digits() -> tuple[Digits, Digits]:
    """Digits to train by, and those held out; needs scikit-learn."""
    from sklearn import datasets

    found = datasets.load_digits()
    cells = found.images.astype(np.uint8)
    labels = found.target.astype(np.int64)
    out = np.zeros(len(labels), dtype=bool)
    out[:: len(labels) // HELD_OUT + 1] = True
    return Digits(cells[~out], labels[~out]), Digits(cells[out], labels[out])


def ink(cells: npt.NDArray[np.uint8]) -> Image.Image:
    """A digit as a mask of `SIDE` x `SIDE` pixels, 255 where it is inked."""
    mask = Image.fromarray((cells * (255 / MOST)).round().astype(np.uint8))
    return mask.resize((SIDE, SIDE), Image.Resampling.BILINEAR)


def draw(cells: npt.NDArray[np.uint8], colour: str) -> Image.Image:
    """A digit in one of `COLOURS`, on white."""
    paper = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    paper.paste(COLOURS[colour], (0, 0, SIDE, SIDE), ink(cells))
    return paper


def png(picture: Image.Image) -> bytes:
    """The picture's file."""
    file = BytesIO()
    picture.save(file, "PNG", optimize=True)
    return file.getvalue()


def write_sheet(digits: Digits, path: Path) -> None:
    """Write digits as one grey picture, in rows, and their labels into its comment."""
    rows = -(-len(digits.labels) // _ROW)
    sheet = np.zeros((rows * STROKES, _ROW * STROKES), dtype=np.uint8)
    for index, cells in enumerate(digits.cells):
        top, left = STROKES * (index // _ROW), STROKES * (index % _ROW)
        sheet[top : top + STROKES, left : left + STROKES] = cells * _SHADE
    labels = "".join(map(str, digits.labels))
    comment = PngInfo()
    comment.add_text("labels", labels)
    Image.fromarray(sheet).save(path, "PNG", optimize=True, pnginfo=comment)


def read_sheet(path: Path) -> Digits:
    """The digits of `write_sheet`."""
    with Image.open(path) as image:
        labels = np.array([int(each) for each in image.info["labels"]], dtype=np.int64)
        sheet = np.asarray(image) // _SHADE
    cells = sheet.reshape(-1, STROKES, _ROW, STROKES).swapaxes(1, 2).reshape(-1, STROKES, STROKES)
    return Digits(cells[: len(labels)], labels)
