"""What steps may return, and the torch losses whose counts and sums are known: against torch's own means."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from trainwright import MeanLoss, SumLoss
from trainwright.update.losses import known_loss, read_step_loss

WEIGHT = torch.tensor([0.5, 2.0, 0.25, 1.5], dtype=torch.float64)


def outputs(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


CLASSES = torch.tensor([0, 3, -100, 1, 2, -100, 1])
GRID = CLASSES.repeat(3, 1)
SHARES = outputs(7, 4).softmax(1)
CASES = [
    (nn.CrossEntropyLoss(), outputs(7, 4), CLASSES, 5),
    (nn.CrossEntropyLoss(), outputs(3, 4, 7), GRID, 15),
    (nn.CrossEntropyLoss(ignore_index=1), outputs(7, 4), CLASSES.clamp(min=0), 5),
    (nn.CrossEntropyLoss(weight=WEIGHT), outputs(7, 4), CLASSES, 0.5 + 1.5 + 2.0 + 0.25 + 2.0),
    (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2), outputs(7, 4), CLASSES, 6.25),
    (nn.CrossEntropyLoss(label_smoothing=0.2), outputs(3, 4, 7), GRID, 15),
    (nn.CrossEntropyLoss(weight=WEIGHT), outputs(7, 4), SHARES, 7),
    (nn.CrossEntropyLoss(), outputs(3, 4, 5), outputs(3, 4, 5).softmax(1), 15),
    (nn.CrossEntropyLoss(), outputs(4), outputs(4).softmax(0), 1),
    (nn.CrossEntropyLoss(), outputs(4), torch.tensor(2), 1),
    (nn.NLLLoss(weight=WEIGHT), outputs(7, 4).log_softmax(1), CLASSES, 6.25),
    (nn.MSELoss(), outputs(7, 4), SHARES, 28),
    (nn.L1Loss(), outputs(7), SHARES[:, 0], 7),
    (nn.SmoothL1Loss(beta=0.5), outputs(7, 4), SHARES, 28),
    (nn.HuberLoss(delta=0.3), outputs(7, 4), SHARES, 28),
    (nn.BCELoss(weight=WEIGHT), outputs(7, 4).sigmoid(), SHARES, 28),
    (nn.BCEWithLogitsLoss(pos_weight=WEIGHT), outputs(7, 4), SHARES, 28),
    (F.cross_entropy, outputs(7, 4), CLASSES, 5),
    (F.nll_loss, outputs(7, 4).log_softmax(1), CLASSES, 5),
    (
        partial(F.cross_entropy, weight=WEIGHT, ignore_index=0),
        outputs(7, 4),
        CLASSES.clamp(min=0),
        1.5 + 2.0 + 0.25 + 2.0,
    ),
    (partial(F.mse_loss), outputs(7, 4), SHARES, 28),
    (F.binary_cross_entropy_with_logits, outputs(7, 4), SHARES, 28),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_the_count_is_what_torchs_mean_divides_by(case):
    loss, output, target, count = CASES[case]
    known = known_loss(loss)
    assert known.count(target) == pytest.approx(count)
    evaluated = read_step_loss(known.evaluated(output, target))
    for given in (evaluated, known.with_count(output, target, known.count(target))):
        assert float(given.mean) == pytest.approx(float(loss(output, target)), rel=1e-12)


@pytest.mark.parametrize("shapes", [((6, 1), (6, 3)), ((6, 3), (6, 1)), ((4, 1), (1, 3))])
def test_the_mean_of_a_loss_that_torch_broadcasts_is_torchs(shapes):
    loss, output, target = nn.MSELoss(), outputs(*shapes[0]), outputs(*shapes[1])
    with pytest.warns(UserWarning, match="broadcast"):
        found = known_loss(loss).evaluated(output, target)
        assert found.loss == loss(output, target) and found.count == target.numel()


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(), torch.full((3,), -100)),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.full((3,), -100)),
        (F.cross_entropy, torch.full((3, 2), -100)),
        (nn.CrossEntropyLoss(weight=torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64)), torch.zeros(3).long()),
        (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), torch.full((3,), -100)),
    ],
)
def test_a_micro_batch_that_counts_nothing_has_the_gradient_0(loss, target):
    output = outputs(3, 4, *target.shape[1:]).requires_grad_()
    known = known_loss(loss)
    assert known.count(target) == 0
    step_loss = known.with_count(output, target, 0)
    torch.autograd.backward((step_loss.loss,), (torch.zeros_like(step_loss.loss),))
    assert not output.grad.any()


class Changed(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return 2 * super().forward(output, target)


def hooked():
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda *_: None)
    return loss


@pytest.mark.parametrize(
    "loss",
    [
        Changed(),
        hooked(),
        nn.KLDivLoss(reduction="batchmean"),
        nn.CrossEntropyLoss(reduction="none"),
        partial(F.mse_loss, weight=WEIGHT),
        lambda output, target: F.mse_loss(output, target) / 2,
        nn.Sequential(),
        None,
    ],
)
def test_what_is_not_torchs_own_is_not_known(loss):
    assert known_loss(loss) is None


def test_a_sum_is_known_as_one():
    assert known_loss(nn.CrossEntropyLoss(reduction="sum")).reduction == "sum"
    assert known_loss(partial(F.l1_loss, reduction="sum")).reduction == "sum"


def test_every_form_of_a_loss_is_read():
    loss = torch.tensor(3.0)
    mean, total = read_step_loss(MeanLoss(loss, 5)), read_step_loss(SumLoss(loss, 5))
    assert (mean.loss, mean.count, mean.is_sum) == (loss, 5, False)
    assert (total.loss, total.count, total.is_sum) == (loss, 5, True)
    assert read_step_loss(loss).count is None and read_step_loss(loss.reshape(1, 1)).loss.ndim == 0
    assert read_step_loss(SumLoss(loss)).count is None and read_step_loss(SumLoss(loss)).is_sum


def test_named_losses_are_added_and_share_a_count():
    read = read_step_loss({"a": MeanLoss(torch.tensor(1.0), 4), "b": MeanLoss(torch.tensor(2.0), 4)})
    assert float(read.loss) == 3.0 and read.count == 4
    assert {name: float(value) for name, value in read.named.items()} == {"a": 1.0, "b": 2.0}
