"""A resume restores the optimizer state of each parameter, in any order of the parameters."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW

from trainwright import EMA, Checkpoint, CheckpointError, Trainer, Updates, batches
from trainwright.update.per_rank_state import load_rank_state, rank_state

generator = torch.Generator().manual_seed(1)
x, y = torch.randn(16, 4, generator=generator), torch.randint(3, (16,), generator=generator)


def network(names="abc"):
    """Three layers of equal shape and a last one, registered in the order of `names`."""
    torch.manual_seed(0)
    layers = {name: nn.Linear(4, 4) for name in "abc"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            for name in names:
                setattr(self, name, layers[name])
            self.last = last

        def forward(self, x):
            return self.last(self.c(self.b(self.a(x).tanh()).tanh()).tanh())

    last = nn.Linear(4, 3)
    return Net()


def plain(optimizer_of, epochs):
    """The loop without a stop, by hand."""
    model = network()
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for at in range(0, len(x), 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[at : at + 4]), y[at : at + 4]).backward()
            optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


def trained(directory, optimizer_of, *, epochs, names="abc", model=None, kind=Trainer, **slots):
    """A run that goes on from the checkpoints of `directory`, and the lines of its header."""
    model = model or network(names)
    checkpoint = Checkpoint(directory, every=Updates(1))
    trainer = kind(model, optimizer_of(model), nn.CrossEntropyLoss(), checkpoint=checkpoint, **slots)
    with redirect_stdout(io.StringIO()) as out:
        trainer.fit(batches((x, y), 4), epochs=epochs, resume="auto")
    return trainer, out.getvalue()


def reversed_groups(cls, split):
    """Two groups, the weights and the biases, each in the order that `split` gives it."""

    def make(model):
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        return cls([{"params": split(weights)}, {"params": split(biases), "lr": 0.01}], lr=0.02)

    return make


ORDERS = {
    "a list": (lambda m: Adam(list(m.parameters()), lr=0.02), lambda m: Adam(list(m.parameters())[::-1], lr=0.02)),
    "names": (
        lambda m: Adam(list(m.named_parameters()), lr=0.02),
        lambda m: Adam(list(m.named_parameters())[::-1], lr=0.02),
    ),
    "groups": (reversed_groups(AdamW, list), reversed_groups(AdamW, lambda group: group[::-1])),
    "momentum": (
        lambda m: SGD(list(m.parameters()), lr=0.02, momentum=0.9),
        lambda m: SGD(list(m.parameters())[::-1], lr=0.02, momentum=0.9),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_resume_with_the_parameters_in_another_order_is_the_run_that_was_never_stopped(tmp_path, order):
    before, after = ORDERS[order]
    trained(tmp_path, before, epochs=1)
    resumed, said = trained(tmp_path, after, epochs=3)
    assert resumed.progress.updates == 12 and "matched by position" not in said
    for name, value in plain(before, 3).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_a_resume_of_a_model_whose_layers_are_registered_in_another_order_is_exact(tmp_path):
    def make(model):
        return Adam(model.parameters(), lr=0.02)

    trained(tmp_path, make, epochs=1)
    resumed, _ = trained(tmp_path, make, epochs=3, names="cab")
    for name, value in plain(make, 3).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_names_in_the_parameter_groups_follow_their_parameters(tmp_path):
    before, after = ORDERS["names"]
    trained(tmp_path, before, epochs=1)
    resumed, _ = trained(tmp_path, after, epochs=2)
    names = [name for name, _ in resumed.model.named_parameters()]
    assert resumed.optimizer.param_groups[0]["param_names"] == names[::-1]


def several(back):
    def make(model):
        halves = [[*model.a.parameters(), *model.b.parameters()], [*model.c.parameters(), *model.last.parameters()]]
        first, second = [Adam(half[::-1] if back else half, lr=0.02) for half in halves]
        return {"second": second, "first": first} if back else {"first": first, "second": second}

    return make


def test_each_of_several_optimizers_is_matched_by_name_whatever_their_order(tmp_path):
    trained(tmp_path, several(False), epochs=1)
    resumed, _ = trained(tmp_path, several(True), epochs=3)
    for name, value in plain(lambda m: Adam(m.parameters(), lr=0.02), 3).items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_the_average_and_an_optimizer_among_parts_of_the_users_own_follow_their_parameters_too(tmp_path):
    class Beside(Trainer):
        """Steps a scale of its own by an optimizer of its own."""

        def parts(self):
            return super().parts() | {"scales": self.beside, "steps": self.own}

        def after_update(self):
            for p in self.beside.parameters():
                p.grad = torch.full_like(p, p.numel() + float(p.detach().sum()))
            self.own.step()

    def run(epochs, back, directory):
        model = network()
        ps = list(model.parameters())
        beside = nn.ParameterDict({"one": nn.Parameter(torch.ones(3)), "two": nn.Parameter(torch.zeros(3))})
        checkpoint = Checkpoint(directory, every=Updates(1))
        optimizer = Adam(ps[::-1] if back else ps, lr=0.02)
        trainer = Beside(
            model, optimizer, nn.CrossEntropyLoss(), checkpoint=checkpoint, average=EMA(0.9), console=False
        )
        trainer.beside = beside
        trainer.own = Adam([*beside.values()][:: -1 if back else 1], lr=0.1)
        trainer.fit(batches((x, y), 4), epochs=epochs, resume="auto")
        return {**model.state_dict(), **beside.state_dict()}

    whole = run(3, False, tmp_path / "whole")
    run(1, False, tmp_path / "cut")
    for name, value in run(3, True, tmp_path / "cut").items():
        assert torch.equal(value, whole[name]), name


class TwoSets(torch.optim.SGD):
    """Shows the mean of all weights so far in eval mode, as schedule-free optimizers do."""

    def __init__(self, params):
        super().__init__(params, lr=0.05, momentum=0.9)

    def _swap(self):
        for group in self.param_groups:
            for p in group["params"]:
                held = self.state[p].setdefault("mean", p.detach().clone())
                p.data, self.state[p]["mean"] = held.clone(), p.detach().clone()

    def eval(self):
        if self.param_groups[0].setdefault("trains", True):
            self.param_groups[0]["trains"] = False
            self._swap()

    def train(self):
        if not self.param_groups[0].setdefault("trains", True):
            self.param_groups[0]["trains"] = True
            self._swap()

    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            self.state[p]["mean"] = (self.state[p].get("mean", p) + p).detach() / 2


def test_the_weights_beside_those_of_a_schedule_free_optimizer_follow_their_parameters(tmp_path):
    def run(epochs, step, directory):
        return trained(directory, lambda m: TwoSets(list(m.parameters())[::step]), epochs=epochs)[0].model.state_dict()

    whole = run(3, 1, tmp_path / "whole")
    run(1, 1, tmp_path / "cut")
    for name, value in run(3, -1, tmp_path / "cut").items():
        assert torch.equal(value, whole[name]), name


def test_the_statistics_that_a_rank_has_of_its_own_follow_their_layers_by_name():
    """Two layers of equal shape, registered the other way round when the run is resumed."""

    def trainer(names, value):
        model = nn.Module()
        for name in names:
            setattr(model, name, nn.BatchNorm1d(2))
            getattr(model, name).running_mean.fill_(value + ord(name))
        return SimpleNamespace(model=model, world=SimpleNamespace(rank=0, size=2), parts=dict)

    saved, resumed = trainer("ab", 1.0), trainer("ba", 0.0)
    own = rank_state(saved, random={}, data={})
    load_rank_state(resumed, own)
    for name in "ab":
        assert getattr(resumed.model, name).running_mean.tolist() == [1.0 + ord(name)] * 2


# What is refused


def test_another_set_of_parameters_is_refused_with_the_difference(tmp_path):
    trained(tmp_path, lambda m: Adam([m.a.weight, m.last.weight], lr=0.02), epochs=1, model=frozen())
    with pytest.raises(CheckpointError) as refused:
        trained(tmp_path, lambda m: Adam([m.b.weight, m.last.weight], lr=0.02), epochs=2, model=frozen("b"))
    assert "part 'optimizer' has the state of other parameters" in str(refused.value)
    assert "only in the checkpoint: model.a.weight; only now: model.b.weight" in str(refused.value)


def frozen(trains="a"):
    model = network()
    model.requires_grad_(False)
    getattr(model, trains).weight.requires_grad_(True)
    model.last.weight.requires_grad_(True)
    return model


def test_a_parameter_in_another_group_is_refused(tmp_path):
    def make(model, rest):
        ps = list(model.parameters())
        return Adam([{"params": ps[:rest]}, {"params": ps[rest:], "lr": 0.01}], lr=0.02)

    trained(tmp_path, lambda m: make(m, 4), epochs=1)
    with pytest.raises(CheckpointError, match=r"model\.c\.weight \(group 1\)"):
        trained(tmp_path, lambda m: make(m, 5), epochs=2)
    with pytest.raises(CheckpointError, match="2 parameter groups in the checkpoint, 1 now"):
        trained(tmp_path, lambda m: Adam(m.parameters(), lr=0.02), epochs=2)


class Wide(torch.optim.Optimizer):
    """Holds a matrix of its own for each parameter."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            square = self.state[p].setdefault("square", torch.zeros(p.numel(), p.numel()))
            square += p.grad.reshape(-1, 1) * p.grad.reshape(1, -1)
            p.sub_(0.01 * p.grad / (1 + square.diagonal().reshape(p.shape)))


class Closure(Trainer):
    def update(self, window):
        self.apply_gradients(closure=lambda: self.compute_gradients(window))


@pytest.mark.parametrize(
    ("cls", "kind", "says"),
    [
        (Wide, Trainer, r"Wide holds a tensor of shape \(16, 16\) for a parameter of shape \(4, 4\)"),
        (LBFGS, Closure, "the vectors of LBFGS run over all parameters"),
    ],
)
def test_state_of_no_single_parameter_is_resumed_only_in_the_saved_order(tmp_path, cls, kind, says):
    def run(epochs, step, directory=tmp_path / "cut"):
        return trained(directory, lambda m: cls(list(m.parameters())[::step], lr=0.01), epochs=epochs, kind=kind)[0]

    whole = run(3, 1, tmp_path / "whole")
    run(1, 1)
    with pytest.raises(CheckpointError, match=says) as refused:
        run(3, -1)
    assert "the order that it was saved in: model.a.weight, model.a.bias" in str(refused.value)
    resumed = run(3, 1)
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


# Without names


def loose(*shapes):
    """An optimizer over the model and over parameters that are in no module."""

    def make(model):
        extra = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for one in extra:
            one.grad = torch.ones_like(one)
        return Adam([*extra, *model.parameters()], lr=0.02)

    return make


def test_parameters_without_a_name_are_matched_by_position_and_shape_with_one_line(tmp_path):
    trained(tmp_path, loose((2,), (3,)), epochs=1)
    _, said = trained(tmp_path, loose((2,), (3,)), epochs=2)
    assert said.count("resumed: 2 parameters of part 'optimizer' without a name: matched by position and shape") == 1
    with pytest.raises(CheckpointError, match=r"parameter 0 of shape \(2,\) in the checkpoint, \(3,\) now"):
        trained(tmp_path, loose((3,), (2,)), epochs=3)
    with pytest.raises(CheckpointError, match="only in the checkpoint: one without a name"):
        trained(tmp_path, loose((2,)), epochs=3)
