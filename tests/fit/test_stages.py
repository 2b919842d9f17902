"""Stages: a script with several `fit`s, killed anywhere and run again, ends as if it had never been killed."""

from __future__ import annotations

import json
import os
import re

import pytest
import torch
from torch import nn

from trainwright import (
    EMA,
    SWA,
    Checkpoint,
    CheckpointError,
    Cosine,
    EarlyStopping,
    Journal,
    Observer,
    OneCycle,
    Trainer,
    Updates,
    batches,
    latest_checkpoint,
)


def data(rows=18, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 4, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


TIMES = ("time", "seconds", "rows", "waiting")


class KilledError(Exception):
    """Ends a run as a kill would."""


class Kills(Observer):
    """Ends the run when an update of all stages is done, before anything else is done for it."""

    def __init__(self, at, how):
        self.at, self.how = at, how

    def on_update(self, update):
        if update.update == self.at:
            self.how()


def die():
    raise KilledError


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 3))


class Plain:
    """A script: builds its trainer anew, and calls `fit` once for each of its stages."""

    epochs = (2, 3, 2)
    every = Updates(2)

    def settings(self):
        return dict(schedule=OneCycle(0.05))

    def __init__(self, directory, *, at=None, how=die, resume="auto"):
        torch.manual_seed(0)
        self.model = self.network()
        torch.manual_seed(1)
        kills = [] if at is None else [Kills(at, how)]
        slot = Checkpoint(directory, best="val_loss", every=self.every, keep=2)
        self.directory = directory
        self.trainer = self.trainer_class()(
            self.model,
            self.optimizer(),
            nn.CrossEntropyLoss(),
            checkpoint=slot,
            console=self.console(),
            observers=[*kills, *self.observers()],
            **self.settings(),
        )
        self.results = []
        for epochs in self.epochs:
            train = batches(data(), 4, shuffle=True)
            self.results.append(self.trainer.fit(train, self.val(), epochs=epochs, resume=resume))
        self.random = torch.get_rng_state()

    def network(self):
        return net()

    def trainer_class(self):
        return Trainer

    def observers(self):
        return []

    def console(self):
        return False

    def val(self):
        return batches(data(seed=1), 9)

    def optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def state(self):
        optimizers = self.trainer.optimizers.values()
        kept = [v for one in optimizers for s in one.state_dict()["state"].values() for v in s.values()]
        return [*self.model.state_dict().values(), *[torch.as_tensor(value) for value in kept], self.random]

    def groups(self):
        return [
            {key: value for key, value in group.items() if key != "params"}
            for one in self.trainer.optimizers.values()
            for group in one.param_groups
        ]


class Ema(Plain):
    def settings(self):
        return dict(average=EMA(0.7), early_stopping=EarlyStopping("val_loss", patience=1, min_delta=0.2))


class Swa(Plain):
    def settings(self):
        return dict(average=SWA(Updates(3), Updates(2)))


class Early(Plain):
    epochs = (6, 6, 2)

    def settings(self):
        return dict(early_stopping=EarlyStopping("val_loss", patience=1, min_delta=0.02))

    def optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.4, momentum=0.9)


class EarlyFromFile(Early):
    def settings(self):
        return dict(early_stopping=EarlyStopping("val_loss", patience=1))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = net(), nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Named(Plain):
    def settings(self):
        return dict(schedule={"head": Cosine()}, clip={"body": 0.5})

    def network(self):
        return Two()

    def optimizer(self):
        return {
            "body": torch.optim.AdamW(self.model.body.parameters(), lr=0.01),
            "head": torch.optim.SGD(self.model.head.parameters(), lr=0.1, momentum=0.9),
        }


class Grows(Plain):
    """Each epoch but the first adds a layer with weights drawn then, and a group for it."""

    def settings(self):
        return dict()

    def trainer_class(self):
        class Growing(Trainer):
            def begin_epoch(self, epoch):
                stage = self._counters.stage
                if epoch:
                    layer = nn.Linear(3, 3)
                    self.model.append(layer)
                    self.optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.003 * (stage + epoch)})

        return Growing


GONE = "as built (those of this stage are gone)"
"""The weights after a stage that was passed over, whose checkpoints were removed by later ones."""


def same(one, other):
    assert len(one.state()) == len(other.state())
    assert all(torch.equal(a, b) for a, b in zip(one.state(), other.state(), strict=True))
    assert one.groups() == other.groups()
    assert one.trainer.history == other.trainer.history
    assert len(one.results) == len(other.results)
    for a, b in zip(one.results, other.results, strict=True):
        assert (a.updates, a.epochs, a.stopped, a.skipped) == (b.updates, b.epochs, b.stopped, b.skipped)
        assert a.history == b.history and b.weights in (a.weights, GONE)
        assert (a.best is None) == (b.best is None)
        if a.best is not None:
            assert (a.best.value, a.best.update, a.best.epoch) == (b.best.value, b.best.update, b.best.epoch)


@pytest.fixture(scope="module", params=[Plain, Ema, Swa, Named, Grows, Early, EarlyFromFile])
def whole(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("whole"))


# An epoch has 5 updates: where none stops early, the first stage ends at 10, the second at 25, the third at 35.
@pytest.mark.sample(10)
@pytest.mark.parametrize("at", [6, 10, 11, 13, 26, 34])
def test_a_script_killed_at_any_update_and_run_again_is_never_killed(whole, at, tmp_path):
    assert len(whole.results) == 3
    at = min(at, whole.trainer.history[-1]["update"])
    with pytest.raises(KilledError):
        type(whole)(tmp_path, at=at)
    same(whole, type(whole)(tmp_path))


def test_a_process_that_is_gone_without_a_word_goes_on_too(tmp_path):
    child = os.fork()
    if not child:
        Ema(tmp_path / "cut", at=13, how=lambda: os._exit(9))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    same(Ema(tmp_path / "whole"), Ema(tmp_path / "cut"))


def test_a_stage_that_is_passed_prints_one_line(tmp_path, capsys):
    class Printed(Plain):
        def console(self):
            return True

    with pytest.raises(KilledError):
        Printed(tmp_path, at=29)
    capsys.readouterr()
    Printed(tmp_path)
    printed = re.sub(r"\n\s*", " ", capsys.readouterr().out)
    first, second, rest = re.split(r"weights: (?:as built \(those of this stage are gone\)|last)", printed, maxsplit=2)
    for line, end in ((first, "epochs=2 reached"), (second, "epochs=3 reached")):
        assert re.fullmatch(rf"\s*a stage in \S+ is finished: {end} (· )?best val_loss \S+ (· )?", line), line
    assert "resumed from" in rest and re.search(r"at\s+update 27", rest), rest


def test_a_journal_of_a_killed_script_is_that_of_one_never_killed(tmp_path):
    def lines(script):
        text = (script.trainer.checkpoint.directory.parent / "journal.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in text]
        return [
            {key: value for key, value in row.items() if key not in TIMES}
            for row in rows
            if row["event"] in ("update", "validate", "epoch")
        ]

    class Journalled(Plain):
        def observers(self):
            return [Journal(self.directory.parent / "journal.jsonl")]

    whole = Journalled(tmp_path / "a" / "run")
    for at in (8, 13, 26):
        with pytest.raises(KilledError):
            Journalled(tmp_path / "b" / "run", at=at)
    cut = Journalled(tmp_path / "b" / "run")
    same(whole, cut)
    assert lines(whole) == lines(cut)


def test_a_stage_without_a_checkpoint_yet_removes_what_the_stage_before_kept(tmp_path):
    Plain(tmp_path / "whole", resume=None)
    with pytest.raises(KilledError):
        Plain(tmp_path / "cut", at=11)
    Plain(tmp_path / "cut")
    names = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("whole", "cut")]
    assert names[0] == names[1]


def test_another_run_is_refused_before_anything_is_changed(tmp_path):
    one = Plain(tmp_path)
    before = sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("*/*"))
    kept = []

    class Watched(Plain):
        def network(self):
            kept.append(net())
            kept.append([v.clone() for v in kept[0].state_dict().values()])
            return kept[0]

    with pytest.raises(CheckpointError, match=r'holds another run(.|\n)*resume="auto"(.|\n)*Checkpoint\('):
        Watched(tmp_path, resume=None)
    assert all(torch.equal(a, b) for a, b in zip(kept[0].state_dict().values(), kept[1], strict=True))
    assert sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("*/*")) == before
    assert latest_checkpoint(tmp_path).name == "update-0000000035" and one.results[-1].updates == 10


def test_totals_go_on_and_a_stage_counts_its_own(tmp_path):
    seen = []

    class Sees(Plain):
        def settings(self):
            return {"schedule": Cosine()}

        def trainer_class(self):
            class Seeing(Trainer):
                def after_update(self):
                    seen.append((self.progress.updates, self.progress.epoch, self.optimizer.param_groups[0]["lr"]))

            return Seeing

    script = Sees(tmp_path)
    assert [each[:2] for each in seen] == [(u + 1, u // 5) for n in (10, 15, 10) for u in range(n)]
    assert [row["update"] for row in script.trainer.history] == list(range(5, 36, 5))
    assert [row["epoch"] for row in script.trainer.history] == [1, 2, 3, 4, 5, 6, 7]
    assert [(r.updates, r.epochs, len(r.history)) for r in script.results] == [(10, 2, 2), (15, 3, 5), (10, 2, 7)]
    assert seen[0][2] == seen[10][2] == seen[25][2]  # the schedule starts anew
    assert seen[9][2] != seen[19][2]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_was_interrupted_goes_on_in_the_same_process(error, tmp_path):
    def make(directory, at=None):
        def raises():
            if at is not None and kills.count == 0:
                kills.count += 1
                raise error

        torch.manual_seed(0)
        kills = Kills(at, raises)
        kills.count = 0
        model = net()
        return Trainer(
            model,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            nn.CrossEntropyLoss(),
            checkpoint=Checkpoint(directory, every=Updates(2)),
            average=EMA(0.7),
            schedule=Cosine(),
            observers=[kills],
            console=False,
        )

    def stages(trainer):
        for epochs in (2, 2):
            torch.manual_seed(epochs)
            train = batches(data(), 4, shuffle=True)
            try:
                result = trainer.fit(train, epochs=epochs, resume="auto")
            except error:
                assert trainer.result.stopped.startswith(error.__name__)
                result = trainer.fit(train, epochs=epochs, resume="auto")
        return result

    whole, cut = make(tmp_path / "whole"), make(tmp_path / "cut", at=13)
    a, b = stages(whole), stages(cut)
    assert all(torch.equal(*pair) for pair in zip(whole.model.parameters(), cut.model.parameters(), strict=True))
    assert a.history == b.history and a.updates == b.updates == 10 and a.stopped == b.stopped


def test_a_stage_that_failed_and_was_left_behind_is_passed_too(tmp_path):
    def script(directory, *, at=None, resume=None):
        torch.manual_seed(0)
        model = net()
        trainer = Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            checkpoint=Checkpoint(directory, every=Updates(2)),
            observers=[] if at is None else [Kills(at, die)],
            console=False,
        )

        def breaks():
            yield from list(batches(data(), 4))[:3]
            raise ZeroDivisionError

        results = []
        for stage in range(3):
            try:
                train = breaks() if stage == 0 else batches(data(), 4, shuffle=True, seed=stage)
                results.append(trainer.fit(train, max_updates=5, resume=resume))
            except ZeroDivisionError:
                results.append(trainer.result)
        return model, [(one.updates, one.stopped, one.history) for one in results]

    model, results = script(tmp_path / "whole")
    with pytest.raises(KilledError):
        script(tmp_path / "cut", at=11)
    again, also = script(tmp_path / "cut", resume="auto")
    assert results == also and [one[0] for one in results] == [3, 5, 5]
    pairs = zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
