"""`self.state` in checkpoints, skips and evaluations; `frozen=` modules that help and are not trained."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from trainwright import Checkpoint, CheckpointError, Probe, SettingError, Trainer, Updates, batches
from trainwright.checkpointing.format import read_manifest

x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
y = torch.arange(12) % 3


def made(cls=Trainer, **settings):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return cls(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **{"console": False, **settings}
    )


class Carries(Trainer):
    """Adds its state to each output, and counts; starts it in the first epoch."""

    dies = None

    def begin_epoch(self, epoch):
        if not epoch:
            self.state.update(h=torch.zeros(3), n=0, inner={"list": [1.5, (True, None)], 7: b"x"})

    def training_step(self, batch):
        if self.progress.updates == self.dies:
            raise ZeroDivisionError
        output = self.model(batch[0]) + self.state["h"]
        self.state["h"] = output.detach().mean(0)
        self.state["n"] += 1
        self.state["inner"]["list"][0] += 1
        return self.loss(output, batch[1])


def test_evaluation_and_probes_work_on_a_copy_of_the_state():
    class Validates(Carries):
        def validation_step(self, batch):
            self.state["n"] += 100
            self.state["h"] += 1  # in place
            self.state["mine"] = 1
            return super().validation_step(batch)

    def probe(trainer):
        trainer.state["inner"]["list"].append("probed")
        trainer.predict(batches((x, y), 4))

    plain, watched = made(Carries), made(Validates, observers=[Probe(probe, every=Updates(2))])
    plain.fit(batches((x, y), 4), epochs=2)
    watched.fit(batches((x, y), 4), batches((x, y), 4), epochs=2)
    assert torch.equal(plain.state.pop("h"), watched.state.pop("h")) and plain.state == watched.state
    assert torch.equal(plain.model.weight, watched.model.weight)


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 0, {1, 2}, torch.Generator(), nn.Linear(1, 1), threading.Lock(), (i for i in "ab"), 1j],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("val", [False, True])
def test_state_that_cannot_be_saved_is_refused_before_the_first_update_by_its_key(value, val, tmp_path):
    trainer = made(checkpoint=Checkpoint(tmp_path))
    trainer.state["memory"] = {"queue": [1, value]}
    with pytest.raises((CheckpointError, SettingError), match=r"state\W*memory\W*queue\W*1") as caught:
        trainer.fit(batches((x, y), 4), batches((x, y), 4) if val else None, epochs=1)
    assert type(value).__name__ in str(caught.value)
    assert trainer.progress.updates == 0 and list(tmp_path.glob("update-*")) == []


# Frozen modules.


def teacher():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))


class Distils(Trainer):
    def training_step(self, batch):
        net = self.frozen["teacher"]
        assert not any(module.training for module in net.modules())
        assert not any(p.requires_grad for p in net.parameters())
        output = self.model(batch[0])
        target = net(batch[0])
        assert not target.requires_grad
        return self.loss(output, target.softmax(1))


def test_a_frozen_module_helps_and_is_neither_trained_nor_saved_and_comes_back_as_it_was(tmp_path):
    net = teacher()
    net[0].bias.requires_grad_(False)
    net[2].eval()
    before = [value.clone() for value in net.state_dict().values()]
    trainer = made(Distils, frozen={"teacher": net}, checkpoint=Checkpoint(tmp_path))
    trainer.fit(batches((x, y), 4), batches((x, y), 4), epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(before, net.state_dict().values(), strict=True))
    assert [p.requires_grad for p in net.parameters()] == [True, False, True, True]
    assert [module.training for module in net.modules()] == [True, True, True, False]
    assert all(p.grad is None for p in net.parameters())
    files = read_manifest(tmp_path / "update-0000000006")["files"]
    assert not any("teacher" in name or "frozen" in name for name in files)
    assert "teacher" not in str(trainer.optimizer.state_dict())


def test_a_frozen_module_is_put_back_after_an_error_too():
    net = teacher()
    trainer = made(Distils, frozen={"teacher": net})
    with pytest.raises(RuntimeError):
        trainer.fit([(x, y), (x[:, :2], y)], epochs=1)
    assert all(p.requires_grad for p in net.parameters()) and all(module.training for module in net.modules())


def test_a_frozen_module_is_placed_like_the_model():
    net = nn.Linear(2, 2)
    assert next(made(frozen={"teacher": net}).frozen["teacher"].parameters()).device.type == "cpu"
    meta = torch.device("meta")
    trainer = Trainer(nn.Linear(2, 2, device=meta), device="meta", frozen={"teacher": nn.Linear(2, 2)})
    assert trainer.frozen["teacher"].weight.device == meta


def test_a_frozen_module_is_in_eval_mode_in_a_lone_evaluation():
    trainer = made(Distils, frozen={"teacher": teacher()})
    trainer.frozen["teacher"].requires_grad_(False)
    one, other = (trainer.evaluate(batches((x, y), 4)) for _ in range(2))
    assert one == other and trainer.frozen["teacher"].training


def test_the_model_or_a_part_of_it_as_a_frozen_module_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for module, fix in (
        (nn.Sequential(model[0]), r"freeze\(model\.part\)"),
        (model, r"'body': copy\.deepcopy\(model\)"),
    ):
        with pytest.raises(SettingError, match=rf"shares parameters with the model(.|\n)*{fix}"):
            Trainer(model, None, frozen={"body": module})


@pytest.mark.parametrize("frozen", [nn.Linear(1, 1), {"teacher": 3}, {"teacher": nn.Linear}, [("teacher", teacher())]])
def test_what_is_no_dict_of_modules_is_refused(frozen):
    with pytest.raises(TypeError, match="frozen"):
        Trainer(nn.Linear(1, 1), frozen=frozen)


@pytest.mark.parametrize(
    "returned",
    [lambda ours: {}, lambda ours: None, lambda ours: {name: ours[name] for name in ours if name != "model"}],
)
def test_parts_without_those_of_the_trainer_are_refused_before_the_first_update(returned, tmp_path):
    class Alone(Trainer):
        def parts(self):
            return returned(super().parts())

    trainer = made(Alone, checkpoint=Checkpoint(tmp_path))
    with pytest.raises(SettingError, match=r"parts\(\) of Alone leaves out .*model(.|\n)*super\(\)\.parts\(\)"):
        trainer.fit(batches((x, y), 4), epochs=1)
    assert trainer.progress.updates == 0
