"""The picture of the layers in the docs is the one that the source gives."""

from __future__ import annotations

from xml.etree import ElementTree

import draw_layers
from layers import LAYERS, files, folder_imports, place


def test_the_committed_picture_is_what_the_imports_give() -> None:
    stale = "run `python tests/architecture/draw_layers.py` and commit docs/development/layers.svg"
    assert draw_layers.PICTURE.read_text() == draw_layers.picture(), stale


def test_every_folder_and_every_import_is_in_the_picture() -> None:
    texts = [
        text.text for text in ElementTree.fromstring(draw_layers.picture()).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {place(path) for path in files()} <= set(texts)
    numbers = sorted(str(n) for (here, there), n in folder_imports().items() if LAYERS[there] < LAYERS[here])
    assert all(texts.count(n) >= 2 * numbers.count(n) for n in numbers), "each number is drawn with its white edge"
