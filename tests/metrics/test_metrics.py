"""Metrics: exact over any batches, refused early when they cannot work."""

import dataclasses
import math
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from trainwright import Checkpoint, StepOutput, Trainer, Updates
from trainwright.core.errors import CheckpointError, SettingError
from trainwright.core.trees import tensors_in
from trainwright.metrics.metric_set import MetricSet, check_metrics
from trainwright.metrics.metrics import Derived, accuracy, top_k
from trainwright.metrics.totals import Total


def scores(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(high, *shape, seed=1):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def measured(metric, output, target):
    total = Total()
    total.take(metric(output, target), len(output))
    return total.value


class Count:
    """A metric object with the least that is asked for."""

    def __init__(self):
        self.seen = 99

    def update(self, output, target):
        self.seen += len(output)

    def compute(self):
        return torch.tensor(self.seen)

    def reset(self):
        self.seen = 0


class Saved(Count):
    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, tree):
        self.seen = tree["seen"]


# --- accuracy and top_k


def test_accuracy_does_not_count_ignored_targets():
    output, target = scores(50, 7), classes(7, 50)
    target[::3] = -100
    kept = target != -100
    right = (output.argmax(1) == target)[kept]
    assert measured(accuracy, output, target) == right.sum().item() / kept.sum().item()
    meters = MetricSet({"accuracy": accuracy})
    meters.update(output, torch.full_like(target, -100), 50)
    meters.update(output, target, 50)
    assert meters.compute()["accuracy"] == right.sum().item() / kept.sum().item()


def test_accuracy_counts_positions():
    output, target = scores(5, 7, 3, 2), classes(7, 5, 3, 2)
    target[0] = -100
    kept = target != -100
    right = (output.argmax(1) == target)[kept].sum().item()
    assert measured(accuracy, output, target) == right / kept.sum().item()


@pytest.mark.parametrize("shape", [(40,), (40, 1), (40, 1, 2, 2)])
def test_one_class_is_a_logit(shape):
    output = scores(*shape)
    target = classes(2, *shape)
    expected = ((output > 0) == target.bool()).double().mean().item()
    assert 0 < expected < 1
    assert measured(accuracy, output, target) == expected
    assert measured(accuracy, output, target.float()) == expected
    assert measured(accuracy, output, target.bool()) == expected
    assert measured(accuracy, output, target.flatten(0, 1) if len(shape) > 1 else target[:, None]) == expected


@pytest.mark.parametrize("k", [1, 3, 7])
def test_top_k_is_the_share_among_the_best(k):
    output, target = scores(50, 7), classes(7, 50)
    target[4] = -100
    order = output.argsort(1, descending=True)[:, :k]
    right = [t in row for row, t in zip(order.tolist(), target.tolist(), strict=True)]
    assert measured(top_k(k), output, target) == sum(right) / 49
    assert top_k(k).__name__ == f"top_{k}"


def test_top_1_is_accuracy_for_positions_too():
    output, target = scores(5, 7, 3), classes(7, 5, 3)
    assert measured(top_k(1), output, target) == measured(accuracy, output, target)


def test_more_than_all_classes_is_refused():
    with pytest.raises(SettingError, match="7 classes only"):
        top_k(8)(scores(5, 7), classes(7, 5))


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_top_k_wants_a_whole_number(k):
    with pytest.raises(SettingError, match="at least 1"):
        top_k(k)


@pytest.mark.parametrize(
    ("output", "target", "fix"),
    [
        ((6, 7), (6, 7), "argmax"),  # one-hot or multi-label: not guessed
        ((6, 5, 7), (6, 5), "movedim"),  # (N, T, C)
        ((6, 7), (5,), "these shapes"),
        ((6, 1), (5,), "these shapes"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(output, target, fix):
    with pytest.raises(SettingError, match=fix):
        accuracy(scores(*output), classes(2, *target))


def test_class_numbers_as_floats_are_refused():
    with pytest.raises(SettingError, match=r"target \(6,\) torch.float32"):
        accuracy(scores(6, 7), classes(7, 6).float())


# --- MetricSet


def test_update_reads_nothing_from_a_device_and_accuracy_costs_seven_operations(monkeypatch):
    monkeypatch.setitem(Total.__init__.__kwdefaults__, "wide", True)  # sums as on an accelerator

    class Ops(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    names = []
    output, target = scores(50, 7), classes(7, 50)
    meters = MetricSet({"accuracy": accuracy, "top": top_k(2), "mae": lambda o, t: (o[:, 0] - t).abs()}, spread=True)
    plain = MetricSet({"accuracy": accuracy})
    meters.update(output, target, 50)
    plain.update(output, target, 50)
    with Ops():
        meters.update(output, target, 50)
        assert not {"_local_scalar_dense", "item", "is_nonzero", "equal"} & set(names)
        names.clear()
        plain.update(output, target, 50)
    assert len(names) <= 7, names


def test_an_empty_batch_is_passed_over():
    class Fussy(Count):
        def update(self, output, target):
            assert len(output)
            super().update(output, target)

    meters = MetricSet({"ce": F.cross_entropy, "seen": Fussy()})
    meters.update(scores(4, 3), classes(3, 4), 4)
    before = meters.compute()
    meters.update(scores(0, 3), classes(3, 0), 0)
    assert meters.compute() == before
    assert not math.isnan(before["ce"])


class Stores:
    """A metric object that keeps what it gets."""

    had_a_graph: ClassVar[list[bool]] = []

    def __init__(self):
        self.reset()

    def update(self, output, target):
        self.pairs.append((output, target))
        self.had_a_graph.append(getattr(output, "requires_grad", False))

    def compute(self):
        return len(self.pairs)

    def reset(self):
        self.pairs = []


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    hidden: list


@pytest.mark.parametrize(
    "form", [lambda t: t, lambda t: (t, [t]), lambda t: {"a": {"b": t}}, lambda t: Outputs(t, [t])]
)
def test_metrics_get_detached_outputs_and_targets_of_any_form(form):
    graph = scores(4, 3).requires_grad_() * 2
    seen = Stores()
    meters = MetricSet({"stores": lambda o, t: seen.update(o, t) or 0.0})
    meters.update(form(graph), form(graph + 1), 4)
    for given, original in zip(seen.pairs[0], (form(graph), form(graph + 1)), strict=True):
        assert type(given) is type(original)
        tensors = list(tensors_in(given))
        assert tensors and not any(t.requires_grad for t in tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_in(original), strict=True))


@pytest.mark.parametrize("own", [False, True], ids=["default step", "a step with gradients in validation"])
def test_a_metric_that_stores_outputs_holds_no_graph_and_can_be_saved(own, tmp_path):
    class Enables(Trainer):
        def validation_step(self, batch):
            with torch.enable_grad():
                output = self.model(batch[0])
                return StepOutput(self.loss(output, batch[1]), output, batch[1])

    Stores.had_a_graph.clear()
    model, data = nn.Linear(4, 3), (scores(8, 4), classes(3, 8))
    metric, checkpoint = Stores(), Checkpoint(tmp_path, every=Updates(1))
    settings = {"metrics": {"stores": metric}, "checkpoint": checkpoint, "console": False}
    trainer = (Enables if own else Trainer)(model, SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(), **settings)
    assert trainer.fit(data, data, epochs=2, batch_size=4).updates == 4
    assert Stores.had_a_graph == [False] * len(Stores.had_a_graph) and len(Stores.had_a_graph) >= 8
    assert trainer.predict(data, batch_size=4).requires_grad is False


def test_predictions_of_a_step_that_enables_gradients_are_detached():
    class Forces(Trainer):
        def predict_step(self, batch):
            with torch.enable_grad():
                return {"output": self.model(batch[0])}

    predicted = Forces(nn.Linear(4, 3), console=False).predict((scores(8, 4), classes(3, 8)), batch_size=4)
    assert predicted["output"].shape == (8, 3) and not predicted["output"].requires_grad


def test_errors_are_standard_errors_of_what_came_by_row():
    output, target = scores(60, 3), classes(3, 60)
    target[:10] = -100
    meters = MetricSet({"accuracy": accuracy, "ce": F.cross_entropy, "first": lambda o, t: o[:, 0]}, spread=True)
    for o, t in zip(output.split(25), target.split(25), strict=True):
        meters.update(o, t, len(o))
    errors = meters.errors("val_")
    hits = (output.argmax(1) == target)[10:].double()
    assert list(errors) == ["val_accuracy", "val_first"]
    assert errors["val_accuracy"] == pytest.approx(hits.std(correction=0).item() / math.sqrt(50), rel=1e-12)
    assert errors["val_first"] == pytest.approx(output[:, 0].double().std(correction=0).item() / math.sqrt(60))
    assert MetricSet({"accuracy": accuracy}).errors() == {}


def test_objects_run_on_a_reset_copy_of_their_own():
    mine = Count()
    first, second = MetricSet({"seen": mine}), MetricSet({"seen": mine})
    first.update(scores(4, 3), classes(3, 4), 4)
    first.update(scores(2, 3), classes(3, 2), 2)
    second.update(scores(1, 3), classes(3, 1), 1)
    assert (first.compute("val_"), second.compute(), mine.seen) == ({"val_seen": 6.0}, {"seen": 1.0}, 99)
    first.reset()
    assert math.isnan(first.compute()["seen"])


def test_objects_move_to_where_the_outputs_lie():
    class Moving(Count, nn.Module):
        def __init__(self):
            nn.Module.__init__(self)
            self.register_buffer("total", torch.zeros(()))

        def reset(self):
            self.total.zero_()

        def update(self, output, target):
            self.total += output["logits"][0].sum()

    meters = MetricSet({"moving": Moving()})
    meters.update({"logits": [torch.ones(2, device="meta")]}, torch.zeros(2), 2)
    assert meters._metrics[0].metric.total.device.type == "meta"


def test_an_object_whose_move_makes_another_is_replaced_by_it():
    class There(Count):
        def compute(self):
            return 5.0

    class Here(Count):
        def to(self, device):
            return There()

    meters = MetricSet({"moved": Here()})
    meters.update(scores(4, 3), classes(3, 4), 4)
    assert meters.compute() == {"moved": 5.0}


def test_an_object_must_compute_one_number():
    class Many(Count):
        def compute(self):
            return torch.rand(3)

    meters = MetricSet({"many": Many()})
    meters.update(scores(4, 3), classes(3, 4), 4)
    with pytest.raises(SettingError, match=r"metric 'many'.*shape \(3,\)"):
        meters.compute()


def test_derived_numbers_read_the_others_without_prefix():
    meters = MetricSet(
        {
            "double": Derived(lambda n: 2 * n["perplexity"]),
            "perplexity": Derived(lambda n: math.exp(n["loss"])),
            "accuracy": accuracy,
            "wrong": Derived(lambda n: 1 - n["accuracy"]),
        }
    )
    meters.update(torch.eye(4), torch.tensor([0, 1, 2, 0]), 4)
    with pytest.raises(SettingError, match="'perplexity'"):  # derived later
        meters.compute("val_", {"loss": 2.0})
    meters = MetricSet(
        {"perplexity": Derived(lambda n: math.exp(n["loss"])), "half": Derived(lambda n: n["perplexity"] / 2)}
    )
    assert not meters.reads_output
    meters.update(None, None, 4)
    assert meters.compute("val_", {"loss": 0.0}) == {"val_perplexity": 1.0, "val_half": 0.5}
    assert meters.compute("", {"loss": 1e9})["perplexity"] == math.inf
    assert math.isnan(meters.compute("", {"loss": math.nan})["perplexity"])


def test_a_misspelt_number_of_a_derived_metric_is_named():
    meters = MetricSet({"perplexity": Derived(lambda n: math.exp(n["los"]))})
    with pytest.raises(SettingError, match=r"'los'. Did you mean 'loss'"):
        meters.compute("val_", {"loss": 1.0})


def test_a_derived_metric_must_give_a_number():
    with pytest.raises(SettingError, match="one number"):
        MetricSet({"x": Derived(lambda n: "high")}).compute("", {"loss": 1.0})
    with pytest.raises(SettingError, match="Derived"):
        Derived(3)


@pytest.mark.parametrize("name", ["loss", "lr", "epoch", "update", "grad_norm", "val_accuracy", "", 3])
def test_names_of_the_run_are_refused(name):
    with pytest.raises(SettingError, match="metric name"):
        check_metrics({name: accuracy})


@pytest.mark.parametrize(
    ("metric", "says"),
    [
        (top_k, "top_k\\(5\\)"),
        (Count, "Count\\(\\)"),
        (nn.MSELoss, "MSELoss\\(\\)"),
        ("accuracy", "is 'accuracy'"),
        (lambda output: 0, "cannot be called with \\(output, target\\)"),
    ],
)
def test_what_is_no_metric_is_refused_before_any_batch(metric, says):
    with pytest.raises(SettingError, match=says):
        check_metrics({"mine": metric})


def test_a_factory_that_takes_two_is_refused_at_the_first_batch():
    meters = MetricSet({"mine": lambda beta, threshold: lambda output, target: 0.0})
    with pytest.raises(SettingError, match=r"metric 'mine'.*function(.|\n)*call it"):
        meters.update(scores(4, 3), classes(3, 4), 4)


def test_metrics_that_are_not_fed_are_refused_with_the_line_to_write():
    with pytest.raises(SettingError, match=r"no output(.|\n)*StepOutput\(loss, output, target\)"):
        MetricSet({"accuracy": accuracy}).update(None, None, 4)
    with pytest.raises(SettingError, match="no target"):
        MetricSet({"accuracy": accuracy}).update(scores(4, 3), None, 4)


def test_saved_sums_go_on_bit_for_bit():
    output, target = scores(90, 7), classes(7, 90)

    def make():
        return MetricSet(
            {"accuracy": accuracy, "ce": F.cross_entropy, "seen": Saved(), "d": Derived(lambda n: n["ce"])}
        )

    def feed(meters, start, end):
        for i in range(start, end, 10):
            meters.update(output[i : i + 10], target[i : i + 10], 10)

    whole, first, second = make(), make(), make()
    feed(whole, 0, 90)
    feed(first, 0, 40)
    saved = first.state_dict()
    feed(first, 40, 90)
    second.load_state_dict(saved)
    assert second.compute()["seen"] == 40
    feed(second, 40, 90)
    assert second.compute() == whole.compute() == first.compute()
    assert whole.compute()["seen"] == 90


def test_sums_of_other_metrics_are_not_loaded():
    with pytest.raises(CheckpointError, match="other metrics"):
        MetricSet({"accuracy": accuracy}).load_state_dict(MetricSet({"top": top_k(2)}).state_dict())


def test_an_object_without_a_state_dict_is_saved_by_its_attributes():
    def fed(meters, times):
        for _ in range(times):
            meters.update(scores(4, 3), classes(3, 4), 4)
        return meters

    saved = fed(MetricSet({"seen": Count()}), 2).state_dict()
    resumed = MetricSet({"seen": Count()})
    resumed.load_state_dict(saved)
    assert fed(resumed, 1).compute() == fed(MetricSet({"seen": Count()}), 3).compute()


def test_an_object_that_cannot_be_saved_is_refused_before_it_is_fed():
    class Bare:
        __slots__ = ("seen",)

        def reset(self):
            self.seen = 0

        update, compute = Count.update, Count.compute

    MetricSet({"seen": Count()}).state_dict()
    with pytest.raises(CheckpointError, match=r"'bare' cannot be saved: Bare has neither"):
        MetricSet({"bare": Bare()}).state_dict()
