"""`fashion_mnist.py` reads IDX files as they are defined, refuses others by name, and keeps its promises."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys

import pytest
import torch
from loading import EXAMPLES
from torch import nn


def idx(values, *, kind=8):
    """The bytes of an IDX file, written from the definition of the format."""
    return struct.pack(f">HBB{values.dim()}i", 0, kind, values.dim(), *values.shape) + bytes(
        values.byte().flatten().tolist()
    )


def written(directory, *, rows=40, packed=()):
    """The four files with pictures whose class is the row of pixels that is bright, and what they hold."""
    held = {}
    for part, number in (("train", rows), ("t10k", rows // 2)):
        classes = torch.arange(number) % 10
        images = torch.randint(0, 60, (number, 28, 28), generator=torch.Generator().manual_seed(number))
        images[torch.arange(number), 2 * classes + 4] = 250
        held[f"{part}-images-idx3-ubyte"], held[f"{part}-labels-idx1-ubyte"] = images, classes
    for name, values in held.items():
        data = idx(values)
        path = directory / (f"{name}.gz" if name in packed else name)
        path.write_bytes(gzip.compress(data) if name in packed else data)
    return held


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(7,), (3, 2), (5, 4, 3)])
def test_a_file_gives_what_was_written(example, tmp_path, shape, packed):
    values = torch.randint(0, 256, shape, dtype=torch.uint8)
    path = tmp_path / "values"
    path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
    assert torch.equal(example.read_idx(path), values)


WHOLE = idx(torch.zeros(4, 3, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (WHOLE[:-1], r"11 values, and its header says \(4, 3\)"),
        (WHOLE + b"\0", r"13 values, and its header says \(4, 3\)"),
        (WHOLE[:10], "inside of its header, after 10 of 12 bytes"),
        (b"", "no IDX file: it begins with b''"),
        (b"<html><body>", "no IDX file: it begins with b'<htm'"),
        (idx(torch.zeros(4), kind=0x0D), "type 0x0d; read is 0x08, uint8"),
        (idx(torch.zeros(0)), r"0 values, and its header says \(0,\)"),
        (gzip.compress(WHOLE)[:-9], "damaged, or was not downloaded completely"),
        (gzip.compress(WHOLE)[:-4] + b"\1\2\3\4", "damaged, or was not downloaded completely"),
        (gzip.compress(WHOLE)[:12] + b"\xff" * 8, "damaged, or was not downloaded completely"),
    ],
    ids=["short", "long", "header", "empty", "a page", "floats", "no rows", "gz short", "gz sum", "gz bytes"],
)
def test_other_files_are_refused_with_their_name(example, tmp_path, data, says):
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"train-images-idx3-ubyte [a-z ]+{says}"):
        example.read_idx(path)


def test_four_files_make_the_pictures(example, tmp_path):
    held = written(tmp_path, packed={"train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"})
    pictures = example.clothes(tmp_path)
    for part, (images, classes) in (("train", pictures.train), ("t10k", pictures.test)):
        assert images.dtype is torch.uint8
        assert torch.equal(images[:, 0], held[f"{part}-images-idx3-ubyte"].to(torch.uint8))
        assert torch.equal(classes, held[f"{part}-labels-idx1-ubyte"])


def test_a_missing_file_is_named_and_no_other(example, tmp_path):
    written(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="holds no t10k-labels-idx1-ubyte, neither"):
        example.clothes(tmp_path)


def test_pictures_and_classes_that_do_not_belong_together_are_refused(example, tmp_path):
    written(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(torch.zeros(39)))
    with pytest.raises(ValueError, match=r"images \(40, 28, 28\) and classes \(39,\) up to 0"):
        example.clothes(tmp_path)


def changed_row_by_row(images, *, shift, flip, seed):
    """The images by the numbers that the layer draws: one flip and one offset for each row."""
    torch.manual_seed(seed)
    flips = torch.randint(2, (len(images), 1))[:, 0].tolist() if flip else [0] * len(images)
    offsets = torch.randint(2 * shift + 1, (len(images), 2)).tolist() if shift else [(0, 0)] * len(images)
    height, width = images.shape[2:]
    made = []
    for image, mirrored, (top, left) in zip(images, flips, offsets, strict=True):
        around = torch.zeros(len(image), height + 2 * shift, width + 2 * shift, dtype=image.dtype)
        around[:, shift : shift + height, shift : shift + width] = image
        cut = around[:, top : top + height, left : left + width]
        made.append(cut.flip(2) if mirrored else cut)
    return torch.stack(made), flips, offsets


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("shift", "flip"), [(0, True), (3, False), (2, True), (9, True)])
def test_each_row_of_a_batch_is_shifted_and_flipped_by_numbers_of_its_own(example, shift, flip, dtype):
    images = torch.randint(0, 256, (60, 2, 5, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
    kept, layer = images.clone(), example.ShiftAndFlip(shift=shift, flip=flip)
    torch.manual_seed(8)
    made = layer(images)
    expected, flips, offsets = changed_row_by_row(images, shift=shift, flip=flip, seed=8)
    assert made.dtype == dtype and torch.equal(made, expected) and torch.equal(images, kept)
    assert not flip or 0.2 < sum(flips) / 60 < 0.8
    assert shift in (0, 9) or {one for row in offsets for one in row} == set(range(2 * shift + 1))
    assert layer.eval()(images) is images


def test_what_the_files_hold_is_learned(example, tmp_path):
    written(tmp_path, rows=200)
    pictures = example.clothes(tmp_path)._replace(batch_size=25, augment=example.ShiftAndFlip(flip=True))
    assert example.train(pictures, epochs=6) >= 0.9


@pytest.mark.slow
def test_the_promised_share_of_digits_is_right(example):
    assert example.train(example.digits(), epochs=10) >= 0.98


def test_no_convolution_has_a_bias_before_its_batch_norm(example):
    assert not [one for one in example.network().modules() if isinstance(one, nn.Conv2d) and one.bias is not None]


@pytest.mark.slow
def test_a_directory_without_the_files_ends_with_their_names(tmp_path):
    command = [sys.executable, str(EXAMPLES / "fashion_mnist.py"), "--data", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "holds no train-images-idx3-ubyte, train-labels-idx1-ubyte" in done.stderr
    assert "Traceback" not in done.stderr
