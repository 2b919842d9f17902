"""Settings and data by another library's name, or of shapes that torch would train on wrongly, are refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from refusals import make, network, pieces, refused, settings, with_method
from torch import nn

from trainwright import DataError, Epochs, SettingError, Trainer, accuracy
from trainwright.optim.fused import dtype_broken_in_sgd

PRECISIONS = {"bf61": "bf16", "bfloat16": "bf16", "bf16-mixed": "bf16", "BF16": "bf16", "float16": "fp16", "16": "fp16"}
PRECISIONS |= {"16-mixed": "fp16", "half": "fp16", "amp": "fp16", "tf3": "tf32"}


@pytest.mark.parametrize(("name", "meant"), PRECISIONS.items())
def test_a_precision_by_another_name(name, meant):
    call = lambda: Trainer(network(), torch.optim.SGD, nn.CrossEntropyLoss(), precision=name)  # noqa: E731
    first = rf"precision='{name}' is unknown\. Did you mean '{meant}'\?"
    fix = refused(call, SettingError, first=first, want='None, "bf16", "fp16", "tf32", "auto"')
    assert settings(fix) == {"precision": meant}
    assert str(make(**settings(fix)).precision) == meant


@pytest.mark.parametrize(("name", "fixed"), [("fp32", None), ("32", None), ("float32", None), ("mixed", "auto")])
def test_a_precision_that_is_none_of_ours(name, fixed):
    call = lambda: Trainer(network(), torch.optim.SGD, nn.CrossEntropyLoss(), precision=name)  # noqa: E731
    fix = refused(call, SettingError, first=f"precision='{name}' is unknown\\.?", want="MixedPrecision(...)")
    assert settings(fix) == {"precision": fixed}
    make(**settings(fix))


LOSSES = {
    "mse": nn.MSELoss(),
    "l1": nn.functional.l1_loss,
    "huber": nn.HuberLoss(),
    "smooth l1": nn.SmoothL1Loss(),
    "summed": nn.MSELoss(reduction="sum"),
    "bce": nn.BCEWithLogitsLoss(),
}


def columns(number=4, rows=4, column=False):
    return [(x[:rows], torch.ones(rows, 1) if column else torch.ones(rows)) for x, _ in pieces(number)]


@pytest.mark.parametrize("val", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("column", [False, True])
def test_rows_that_torch_would_compare_crosswise(column, loss, accumulate, val):
    layers = [nn.Linear(4, 1), nn.Flatten(0)] if column else [nn.Linear(4, 1)]
    data = columns(column=column)
    trainer = make(model=nn.Sequential(*layers), loss=LOSSES[loss], accumulate=accumulate)
    call = lambda: trainer.fit(data, data if val else None, epochs=1)  # noqa: E731
    shapes = (r"\(4,\)", r"\(4, 1\)") if column else (r"\(4, 1\)", r"\(4,\)")
    first = rf"\w+ on an output {shapes[0]} and a target {shapes[1]}"
    fix = refused(call, DataError, first=first, want="an output and a target of one shape", trainer=trainer)
    assert fix == f"target.{'squeeze' if column else 'unsqueeze'}(1) in split(self, batch)"
    change = fix.removesuffix(" in split(self, batch)")
    cls = with_method(f"def split(self, batch): inputs, target = batch; return (inputs,), {change}")
    trainer = make(cls, nn.Sequential(*layers), LOSSES[loss], accumulate=accumulate)
    assert trainer.fit(data, epochs=1).updates == 4 // accumulate


def test_a_target_per_row_is_not_stretched_over_as_many_outputs():
    trainer = make(model=nn.Linear(4, 4), loss=nn.MSELoss())
    call = lambda: trainer.fit(columns(), epochs=1)  # noqa: E731
    first = r"MSELoss on an output \(4, 4\) and a target \(4,\)"
    fix = refused(call, DataError, first=first, trainer=trainer)
    assert fix == "a last layer of 1 outputs, or other targets from split(self, batch)"


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_one_row_in_another_shape_means_the_same_and_is_let_pass():
    data = columns(2, rows=1)
    assert make(model=nn.Linear(4, 1), loss=nn.MSELoss()).fit(data, data, epochs=1).updates == 2


def test_validation_data_that_the_first_validation_would_use_up():
    trainer = make()
    call = lambda: trainer.fit(pieces(), iter(pieces(1)), epochs=3)  # noqa: E731
    first = "val data: 3 validations, and .* can be iterated only once"
    fix = refused(call, DataError, first=first, want="iterated again", trainer=trainer)
    assert fix == "pass a list of the batches, or a callable `lambda epoch: make_batches(epoch)`"
    assert make().fit(pieces(), pieces(1), epochs=3).updates == 12
    assert make().fit(pieces(), lambda epoch: iter(pieces(1)), epochs=3).updates == 12
    assert make().fit(pieces(), iter(pieces(1)), epochs=3, validate=Epochs(3)).updates == 12


# Kinds.


@pytest.mark.parametrize(
    ("given", "error", "first", "fixed"),
    [
        ({"loss": nn.CrossEntropyLoss}, TypeError, "loss=<class .*CrossEntropyLoss'>", "loss=CrossEntropyLoss()"),
        ({"metrics": {"accuracy": 3}}, SettingError, "metric 'accuracy' is 3", 'metrics={"accuracy": accuracy}'),
        (
            {"metrics": {"accuracy": "acc"}},
            SettingError,
            "metric 'accuracy' is 'acc'",
            'metrics={"accuracy": accuracy}',
        ),
    ],
)
def test_a_thing_of_another_kind(given, error, first, fixed):
    given = {"loss": nn.CrossEntropyLoss()} | given
    call = lambda: Trainer(network(), torch.optim.SGD, **given)  # noqa: E731
    fix = refused(call, error, first=first, want="a function of (output, target)")
    assert fix == fixed
    made = eval(f"dict({fix})", {"CrossEntropyLoss": nn.CrossEntropyLoss, "accuracy": accuracy})
    assert make(**made).fit(pieces(), epochs=1).updates == 4


def test_the_optimizer_of_another_model():
    model, other = network(), network()
    trainer = Trainer(model, torch.optim.SGD(other.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    want = "an optimizer over model.parameters() of the model that is given"
    fix = refused(call, SettingError, first="the optimizer trains no .*", want=want, trainer=trainer)
    assert fix == "build the optimizer from the same model object"
    fixed = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    assert fixed.fit(pieces(), epochs=1).updates == 4


def test_an_optimizer_that_was_built_before_the_model_was_moved():
    model = network().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(pieces(1)[0][0].double()).sum().backward()
    optimizer.step()
    model.to("meta")  # as every device does whose tensors cannot take another's place, this makes new parameters
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), device="meta", console=False)
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    fix = refused(call, SettingError, first="the optimizer trains no parameter of this model")
    assert fix == "build the optimizer from the same model object"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_fused_sgd_that_leaves_weights_of_reduced_precision_untrained(dtype, momentum):
    if dtype_broken_in_sgd([torch.zeros((), dtype=dtype)]) is None:
        pytest.skip("the kernel of this torch is right")
    rows = [(x.to(dtype), y) for x, y in pieces()]
    model = network().to(dtype)
    SGD = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    trainer = Trainer(model, SGD(model.parameters(), fused=True), nn.CrossEntropyLoss(), console=False)
    call = lambda: trainer.fit(rows, epochs=1)  # noqa: E731
    kind = str(dtype).removeprefix("torch.")
    fix = refused(call, SettingError, first=rf"SGD\(\.\.\., fused=True\) with {kind} .*", trainer=trainer)
    assert fix == "SGD(..., fused=False)"
    fixed = Trainer(model, SGD(model.parameters(), fused=False), nn.CrossEntropyLoss(), console=False)
    assert fixed.fit(rows, epochs=1).updates == 4


def test_a_fused_sgd_whose_layer_was_cast_between_two_epochs():
    class Casts(Trainer):
        def begin_epoch(self, epoch):
            if epoch == 1:
                self.model.bfloat16()

    model = network()
    trainer = Casts(model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), nn.CrossEntropyLoss())
    if dtype_broken_in_sgd([torch.zeros((), dtype=torch.bfloat16)]) is None:
        pytest.skip("the kernel of this torch is right")
    with pytest.raises(SettingError, match="with bfloat16 parameters on the CPU"):
        trainer.fit(pieces(), epochs=2)
    assert trainer.progress.updates == 4


def test_a_lazy_module_that_no_batch_has_shaped():
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), console=False)
    call = lambda: trainer.fit(pieces(), epochs=1)  # noqa: E731
    fix = refused(call, SettingError, first=r"0\.weight has no shape yet")
    assert fix == "call model(one_batch) once before fit"
    model(pieces()[0][0])
    assert trainer.fit(pieces(), epochs=1).updates == 4
