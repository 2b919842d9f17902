"""`Fast(compile=...)`: which regions, for how long, what is not compiled, and what is reported of it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo
from compiling import BACKEND, Block, Net, build, by, data, leftovers, same, weights
from torch import nn
from torch.nn import functional as F

from trainwright import Fast, MeanLoss, SettingError, StepError, Trainer
from trainwright.acceleration.compilation import find_regions


@pytest.fixture(autouse=True)
def fresh():
    """Each test compiles anew."""
    torch._dynamo.reset()


class Seen(Trainer):
    """Takes down, in each update, which modules have a compiled call, and how often torch may compile anew."""

    def after_update(self):
        self.seen, self.keys = leftovers(self.model), list(self.model.state_dict())
        self.limit = torch._dynamo.config.recompile_limit


def test_regions_are_the_blocks_that_a_model_repeats_or_all_of_it():
    model = Net()
    assert find_regions(model, "regional") == list(model.blocks)
    assert find_regions(model, "full") == [model]
    assert find_regions(Net(depth=2), "regional")[0].__class__ is Net
    sequential = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(4)])
    assert find_regions(sequential, "regional") == [sequential]  # containers are no blocks
    assert find_regions(nn.Sequential(model, model), (Block,)) == list(model.blocks)
    with pytest.raises(SettingError, match="Net holds no Conv2d"):
        find_regions(model, (nn.Conv2d,))


@pytest.mark.slow
def test_layers_of_torchs_own_are_compiled_too():
    def layers():
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, bias=True)
        return nn.Sequential(
            nn.Linear(4, 4), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(4, 3)
        )

    for regions, what in (("full", "Sequential"), ("regional", "3 TransformerEncoderLayer")):
        torch._dynamo.reset()
        plain, trainer = build(None, model=layers), build(by(regions), model=layers)
        for one in (plain, trainer):
            one.fit(data(20), epochs=2)
        # Torch 2.8 makes a graph for each layer that is a class of its own.
        graphs = "3 graphs" if regions == "regional" and torch.__version__ < "2.9" else "1 graph"
        assert str(trainer._record.path.compiled).startswith(f"{what} by {BACKEND}: {graphs}")
        assert same(weights(plain.model), weights(trainer.model))


@pytest.mark.parametrize(("regions", "count"), [("regional", 3), ("full", 1)])
def test_a_model_is_compiled_in_place_and_comes_back_as_it_was(regions, count):
    trainer = build(by(regions), trainer=Seen)
    before, limit = list(trainer.model.state_dict()), torch._dynamo.config.recompile_limit
    trainer.fit(data(), epochs=1)
    assert len(trainer.seen) == count and trainer.keys == before and trainer.limit == 64
    assert leftovers(trainer.model) == [] and torch._dynamo.config.recompile_limit == limit == 8
    assert all("_compiled_call_impl" not in vars(module) for module in trainer.model.modules())


def test_a_model_comes_back_as_it_was_after_an_error():
    class Fails(Seen):
        def after_update(self):
            super().after_update()
            raise RuntimeError("mine")

    trainer = build(by(), trainer=Fails)
    with pytest.raises(RuntimeError, match="mine"):
        trainer.fit(data(), epochs=1)
    assert trainer.seen and leftovers(trainer.model) == [] and torch._dynamo.config.recompile_limit == 8


def test_the_short_last_batch_runs_uncompiled_in_training_and_validation():
    trainer = build(by("full"))
    trainer.fit(data(44), data(20, shuffle=False), epochs=3)
    record = trainer._record.path.compiled
    assert record.graphs == 2  # one for training, one for validation
    assert record.short == 3 + 3


@pytest.mark.slow
def test_shapes_that_go_on_changing_share_a_graph():
    rows = [8, 16, 24, 32, 40, 48, 56, 64, 72, 80]
    ready = [(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in rows]
    trainer = build(by("full"))
    trainer.fit(ready, epochs=1)
    assert trainer._record.path.compiled.graphs == 4 and trainer._record.path.compiled.short == 0


@pytest.mark.slow
def test_batches_of_ever_fewer_rows_are_no_exceptions():
    rows = [80, *range(79, 47, -1)]
    ready = [(torch.randn(n, 4), torch.randint(0, 3, (n,))) for n in rows]
    trainer = build(by("full"))
    trainer.fit(ready, epochs=1)
    assert 2 <= trainer._record.path.compiled.graphs <= 4 and trainer._record.path.compiled.short < 10


def test_counts_and_reasons_are_reported_at_the_end_and_by_fast_path(capsys):
    trainer = build(by(), console=True)
    assert trainer.fast_path.startswith("L0, eager on cpu")
    result = trainer.fit(data(), data(16, seed=5, shuffle=False), epochs=1)
    (note,) = result.notes
    assert note.startswith(f"compiled 3 Block by {BACKEND}: 2 graphs in ")
    assert "1 compiled again: " in note and "grad_mode" in note
    assert trainer.fast_path.startswith("L0, compiled (3 Block") and "2 graphs" in trainer.fast_path
    printed = capsys.readouterr().out
    assert f"\nfast path: compiles 3 Block by {BACKEND}\n" in printed and "2 graphs" in printed


def test_a_layer_that_is_frozen_later_is_compiled_again_with_its_reason():
    class Freezes(Trainer):
        def begin_epoch(self, epoch):
            self.model.head.weight.requires_grad_(epoch == 0)

    trainer = build(by("full"), trainer=Freezes)
    trainer.fit(data(16), epochs=2)
    assert trainer._record.path.compiled.graphs == 2
    assert any("requires_grad" in reason for reason in trainer._record.path.compiled.again)


@pytest.mark.parametrize("frozen", [{0}, {0, 2}])
def test_a_layer_that_is_unfrozen_later_trains_as_without_compiling(frozen):
    class Unfreezes(Trainer):
        def begin_epoch(self, epoch):
            self.model.head.weight.requires_grad_(epoch not in frozen)

    plain, trainer = build(None, trainer=Unfreezes), build(by("full"), trainer=Unfreezes)
    for one in (plain, trainer):
        one.fit(data(16), epochs=4)
    assert same(weights(plain.model), weights(trainer.model))


def test_a_second_fit_finds_what_the_first_has_compiled():
    trainer = build(by("full"))
    trainer.fit(data(16), epochs=1)
    trainer.fit(data(16), epochs=1)
    assert trainer._record.path.compiled.graphs == 0 and leftovers(trainer.model) == []


def test_steps_of_the_users_own_run_the_compiled_model():
    class Own(Seen):
        def training_step(self, batch):
            x, y = batch
            return F.cross_entropy(self.model(x), y)

        def validation_step(self, batch):
            x, y = batch
            return F.cross_entropy(self.model(x), y)

    plain, trainer = build(None, trainer=Own), build(by("full"), trainer=Own)
    for one in (plain, trainer):
        one.fit(data(44), data(20, shuffle=False), epochs=2)
    assert trainer._record.path.compiled.graphs == 2
    assert trainer.history == plain.history and same(weights(plain.model), weights(trainer.model))


class Inside(nn.Module):
    """A model that computes its own loss."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y)


def test_a_loss_inside_a_compiled_region_whose_count_nobody_sees_is_refused():
    trainer = build(by("full"), model=Inside, loss=None)
    with pytest.raises(StepError, match="inside of a compiled region") as caught:
        trainer.fit(data(), epochs=1)
    assert "def count(self, batch)" in str(caught.value) and trainer.progress.updates == 0


@pytest.mark.slow
def test_a_loss_inside_a_compiled_region_is_weighed_by_a_count_that_is_reported():
    class Counts(Trainer):
        def count(self, batch):
            return len(batch[1])

    class Means(Trainer):
        def training_step(self, batch):
            return MeanLoss(self.model(*batch), len(batch[1]))

    for kind, regions in ((Counts, "full"), (Means, "full"), (Trainer, {Block})):
        torch._dynamo.reset()
        plain, trainer = (
            build(one, model=Inside, loss=None, accumulate=3, trainer=kind) for one in (None, by(regions))
        )
        for one in (plain, trainer):
            one.fit(data(44), epochs=2)
        assert same(weights(plain.model), weights(trainer.model)), kind
        assert [row["loss"] for row in trainer.history] == [row["loss"] for row in plain.history]


def test_an_evaluation_counts_tokens_inside_a_compiled_region_as_without_it():
    class Own(Trainer):
        def validation_step(self, batch):
            return self.model(*batch)

        def training_step(self, batch):
            return MeanLoss(self.model(*batch), len(batch[1]))

    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    y[:7] = -100
    val = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]
    seen = []
    for fast in (None, by("full")):
        trainer = build(fast, model=Inside, loss=None, trainer=Own)
        seen.append(trainer.fit(data(), val, epochs=1).history)
    assert seen[0] == seen[1]
    assert trainer._record.path.compiled.graphs == 1  # of training: what is looked at in a validation is not compiled


def test_an_error_of_the_users_own_is_raised_as_without_a_compiler():
    x = torch.randn(8, 5)  # the stem takes 4
    reported = []
    for fast in (None, by("full")):
        with pytest.raises(RuntimeError) as caught:
            build(fast).fit([(x, torch.zeros(8, dtype=torch.long))], epochs=1)
        reported.append((type(caught.value), str(caught.value), caught.value.__notes__))
    assert reported[0] == reported[1] and "cannot be multiplied" in reported[0][1]


def test_an_error_of_the_compiler_says_how_to_do_without():
    def broken(graph, inputs):
        raise ValueError("no kernel")

    trainer = build(Fast(compile={"backend": broken}))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no kernel") as caught:
        trainer.fit(data(), epochs=1)
    assert "fast=None runs the model as it is" in str(caught.value.__notes__)
    assert leftovers(trainer.model) == []


def test_a_model_that_is_compiled_already_is_refused():
    trainer = build(by())
    trainer.model.blocks[1].compile(backend=BACKEND)
    with pytest.raises(SettingError, match="compiled already") as caught:
        trainer.fit(data(), epochs=1)
    assert "blocks.1.compile()" in str(caught.value) and leftovers(trainer.model) == ["blocks.1"]
    trainer = build(None)
    trainer.model.compile(backend=BACKEND)
    trainer.fit(data(16), epochs=1)  # without `compile` it is the user's, and stays
    assert leftovers(trainer.model) == [""]
    with pytest.raises(SettingError, match=r"torch\.compile\(model\)"):
        build(by(), model=lambda: torch.compile(Net(), backend=BACKEND)).fit(data(), epochs=1)


def test_a_copy_that_is_made_in_between_is_not_compiled():
    class Copies(Trainer):
        def after_update(self):
            self.copy = copy.deepcopy(self.model)

    trainer = build(by(), trainer=Copies)
    trainer.fit(data(8), epochs=1)
    assert leftovers(trainer.copy) == [] and same(weights(trainer.copy), weights(trainer.model))
