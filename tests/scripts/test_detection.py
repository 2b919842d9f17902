"""Detection: pictures and targets of unequal sizes in lists, a model that returns a dict of losses."""

from __future__ import annotations

import pytest
import torch
from plain_scripts import (
    assert_near_weights,
    assert_no_longer,
    assert_same_history,
    assert_same_weights,
    made,
)
from torch import nn
from torch.nn import functional as F

from trainwright import StepError, StepOutput, Trainer, batches

EPOCHS, BOXES = 3, 3


class Detector(nn.Module):
    """As torchvision's detectors: losses in a dict in training, a dict per picture otherwise."""

    def __init__(self):
        super().__init__()
        self.look = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.boxes, self.scores = nn.Linear(32, BOXES * 4), nn.Linear(32, BOXES)

    def forward(self, images, targets=None):
        seen = torch.cat([self.look(image[None]) for image in images])
        boxes, scores = self.boxes(seen).sigmoid().view(-1, BOXES, 4), self.scores(seen)
        if not self.training:
            return [
                {"boxes": some[score > 0], "scores": score[score > 0]}
                for some, score in zip(boxes, scores, strict=True)
            ]
        there = torch.stack([(torch.arange(BOXES) < len(target["boxes"])).to(scores) for target in targets])
        misses = [F.l1_loss(some[: len(t["boxes"])], t["boxes"]) for some, t in zip(boxes, targets, strict=True)]
        return {"box": torch.stack(misses).mean(), "score": F.binary_cross_entropy_with_logits(scores, there)}


def collate(rows):
    images, targets = zip(*rows, strict=True)
    return list(images), list(targets)


class BoxesFound:
    """Boxes found over boxes there."""

    def __init__(self):
        self.reset()

    def update(self, output, target):
        self.found += sum(len(one["boxes"]) for one in output)
        self.there += sum(len(one["boxes"]) for one in target)

    def compute(self):
        return self.found / self.there

    def reset(self):
        self.found = self.there = 0


class DetectionTrainer(Trainer):
    def training_step(self, batch):
        return self.model(*batch)

    def validation_step(self, batch):
        images, targets = batch
        return StepOutput(None, self.model(images), targets)


def by_trainer(model, train, val, accumulate=1):
    optimizer, metrics = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), {"found": BoxesFound()}
    trainer = DetectionTrainer(model, optimizer, metrics=metrics, accumulate=accumulate, console=False)
    return trainer.fit(train, val, epochs=EPOCHS).history, trainer.predict(val)


def by_hand(model, train, val, accumulate=1):
    optimizer, history = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for epoch in range(EPOCHS):
        model.train()
        sums, rows, epoch_batches = torch.zeros(3, dtype=torch.float64), 0, list(train.epoch(epoch))
        for start in range(0, len(epoch_batches), accumulate):
            window = epoch_batches[start : start + accumulate]
            whole = sum(len(images) for images, _ in window)
            optimizer.zero_grad()
            for images, targets in window:
                losses = model(images, targets)
                loss = losses["box"] + losses["score"]
                (loss * (len(images) / whole)).backward()
                sums += torch.stack([loss, losses["box"], losses["score"]]).detach().double() * len(images)
                rows += len(images)
            optimizer.step()
        model.eval()
        metric, found = BoxesFound(), []
        with torch.no_grad():
            for images, targets in val:
                found += model(images)
                metric.update(found[-len(images) :], targets)
        row = dict(zip(("loss", "box", "score"), (sums / rows).tolist(), strict=True))
        history.append(row | {"val_found": metric.compute()})
    return history, found


def data(dtype=torch.float32, same_size=False):
    generator, rows = torch.Generator().manual_seed(0), []
    for number in range(41):
        high, wide = (8, 8) if same_size else (8 + number % 3, 8 + number % 5)
        boxes = torch.rand(1 + number % BOXES, 4, generator=generator, dtype=dtype)
        rows.append((torch.rand(3, high, wide, generator=generator, dtype=dtype) * len(boxes), {"boxes": boxes}))
    return batches(rows[:30], 4, shuffle=True, seed=0, collate=collate), batches(rows[30:], 4, collate=collate)


def test_detection_with_losses_in_a_dict_is_its_plain_loop():
    ours, theirs = made(Detector), made(Detector)
    history, found = by_trainer(ours, *data())
    plain, plainly_found = by_hand(theirs, *data())
    assert_same_history(history, plain)
    assert_same_weights(ours, theirs)
    assert len(found) == len(plainly_found) == 11
    for one, other in zip(found, plainly_found, strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_a_metric_of_several_numbers_is_one_number_per_key():
    class Both(BoxesFound):
        def compute(self):
            return {"share": super().compute(), "there": self.there}

    train, val = data()
    trainer = DetectionTrainer(made(Detector), torch.optim.Adam, metrics={"found": Both()}, console=False)
    result = trainer.fit(train, val=val, epochs=1)
    alone = BoxesFound()
    trainer.model.eval()
    for images, targets in val:
        alone.update(trainer.model(images), targets)
    row = result.history[-1]
    assert (row["val_found_share"], row["val_found_there"]) == (alone.compute(), alone.there)


def test_a_detector_without_a_validation_step_gets_the_advice_to_have_one():
    class Forgets(Trainer):
        training_step = DetectionTrainer.training_step

    model = made(Detector)
    settings = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "console": False}
    with pytest.raises(StepError, match="a step returned list") as caught:
        Forgets(model, **settings).fit(*data(), epochs=1)
    (note,) = caught.value.__notes__
    why, fix = (line.split(maxsplit=1)[1] for line in note.splitlines()[1:])
    assert "validation runs training_step" in why
    exec(fix, namespace := {"StepOutput": StepOutput})
    mended = type("Mended", (Forgets,), {"validation_step": namespace["validation_step"]})
    assert mended(model, **settings, metrics={"found": BoxesFound()}).fit(*data(), epochs=1).updates == 8


def test_windows_of_ragged_batches_are_weighed_by_pictures():
    # The Trainer multiplies each loss by its share, the loop does too, but the epoch's last window is a short one.
    for same_size in (False, True):
        ours, theirs = made(Detector, dtype=torch.float64), made(Detector, dtype=torch.float64)
        by_trainer(ours, *data(torch.float64, same_size), accumulate=3)
        by_hand(theirs, *data(torch.float64, same_size), accumulate=3)
        assert_near_weights(ours, theirs)


def test_detection_is_no_longer_than_its_plain_loop():
    assert_no_longer([DetectionTrainer, by_trainer], [by_hand])
