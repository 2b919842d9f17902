"""Methods and arguments by the names of other libraries are refused, with what to write here."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import io
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from refusals import entry, make, network, noted, pieces
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright
from trainwright import (
    EMA,
    Checkpoint,
    Console,
    Cosine,
    EarlyStopping,
    Epochs,
    Journal,
    Observer,
    OneCycle,
    Probe,
    Seconds,
    SettingError,
    Trainer,
    Updates,
    batches,
)
from trainwright.core.suggestions import (
    FOREIGN_ARGUMENTS,
    FOREIGN_ARGUMENTS_OF,
    FOREIGN_ATTRIBUTES,
    FOREIGN_ATTRIBUTES_OF,
    FOREIGN_HELPERS,
    FOREIGN_METHODS,
    OWN_ARGUMENTS,
    RESERVED,
    with_value,
)
from trainwright.metrics import F1, MAE

EVENTS = {
    "on_train_epoch_start": "begin_epoch",
    "on_epoch_begin": "begin_epoch",
    "on_train_epoch_end": "end_epoch",
    "on_validation_epoch_end": "end_epoch",
    "on_train_batch_end": "after_update",
    "on_step_end": "after_update",
}


def refusal_of(name, *bases):
    with pytest.raises(TypeError) as caught:
        make(type("Mine", bases or (Trainer,), {name: lambda self, *given: None}))
    text = str(caught.value)
    assert text.startswith(f"Mine.{name} is a method of other libraries, and is never called here\n")
    return text.rpartition("  fix   ")[2]


@pytest.mark.parametrize("name", [*FOREIGN_METHODS, *EVENTS])
def test_a_method_of_another_library_is_refused_with_the_line_to_write(name):
    fix = refusal_of(name)
    if fix.startswith("def "):
        namespace = {}
        exec(f"{fix}\n    return None", namespace)
        (hook,) = (function for function in namespace.values() if inspect.isfunction(function))
        assert hook.__name__ == EVENTS.get(name, hook.__name__)
        make(type("Fixed", (Trainer,), {hook.__name__: hook}))
    else:
        names = {"Trainer": Trainer, "torch": torch, "model": network(), "loss": nn.CrossEntropyLoss()}
        assert eval(fix, names).fit(pieces(), epochs=1).updates == 4


@pytest.mark.parametrize("name", ["on_fit_start", "on_save_checkpoint", "on_update", "on_train_start"])
def test_every_method_that_starts_with_on_is_refused_in_a_trainer(name):
    assert "methods of an Observer" in refusal_of(name)
    assert "methods of an Observer" in refusal_of(name, type("Mixin", (), {name: lambda self: None}), Trainer)


def test_helpers_of_ones_own_and_hooks_of_observers_stay():
    class Own(Trainer):
        def compute_loss(self, output, target):
            return self.loss(output, target)

        def training_step(self, batch):
            return self.compute_loss(self.model(batch[0]), batch[1])

        def _on_fit_start(self):
            return None

    class Watches(Observer):
        def on_fit_start(self, plan):
            seen.append(plan.updates)

    seen = []
    make(Own, observers=[Watches()]).fit(pieces(), epochs=1)
    assert seen == [4]


@pytest.mark.parametrize("name", FOREIGN_HELPERS)
def test_a_method_that_only_another_library_calls_is_refused_with_what_to_write(name):
    fix = refusal_of(name)
    assert fix.startswith(FOREIGN_HELPERS[name])
    if fix.startswith("def "):
        namespace = {}
        exec(f"{fix.splitlines()[0]}\n    return None", namespace)
        (hook,) = (function for function in namespace.values() if inspect.isfunction(function))
        make(type("Fixed", (Trainer,), {hook.__name__: hook}))


HOOKS_OF_TRANSFORMERS = (
    *("compute_loss", "compute_metrics", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "prediction_step", "evaluation_loop"),
)


@pytest.mark.parametrize("name", HOOKS_OF_TRANSFORMERS)
def test_a_hook_of_transformers_is_refused_but_not_where_the_class_itself_calls_it(name):
    refusal_of(name)
    step = eval(f"lambda self, batch: self.{name}(batch)")
    mine = {name: lambda self, batch: self.loss(self.model(batch[0]), batch[1]), "training_step": step}
    assert make(type("Mine", (Trainer,), mine)).fit(pieces(), epochs=1).updates == 4


def by_a_call(self):
    return self.setup()


def by_its_name(self):
    return getattr(self, "setup")()  # noqa: B009


def by_an_inner_function(self):
    def inner():
        return self.setup()

    return inner()


def decorated(function):
    def called(self):
        return function(self)

    return called


@decorated
def by_a_decorator_that_wraps(self):
    return self.setup()


def by_one_of_several_names(self):
    return [getattr(self, name)() for name in ("prepare", "setup")]


class Reads:
    uses = property(lambda self: self.setup)


TABLE = {"train": "setup", "test": None}


class Decorated:
    @staticmethod
    @functools.lru_cache
    def uses(trainer):
        return trainer.setup()


WAYS = [
    *(by_a_call, by_its_name, by_an_inner_function, by_a_decorator_that_wraps, by_one_of_several_names),
    *(vars(Reads)["uses"], TABLE, Decorated.uses),
]


@pytest.mark.parametrize("uses", WAYS)
def test_a_method_that_the_class_itself_uses_is_the_users_helper(uses):
    assert make(type("Mine", (Trainer,), {"setup": lambda self: 7, "uses": uses})).setup() == 7
    assert make(type("Child", (type("Mine", (Trainer,), {"uses": uses}),), {"setup": lambda self: 7}))


def test_a_class_that_others_are_derived_from_may_leave_the_use_of_its_helper_to_them():
    class Common(Trainer):
        def compute_loss(self, batch):
            return self.loss(self.model(batch[0]), batch[1])

    class Child(Common):
        def training_step(self, batch):
            return self.compute_loss(batch)

    assert make(Child).fit(pieces(), epochs=1).updates == 4
    with pytest.raises(TypeError, match=r"Common\.compute_loss is a method of other libraries"):
        make(Common)


def test_another_name_for_the_same_method_uses_it():
    class Mine(Trainer):
        def compute_loss(self, batch, scale=1.0):
            return scale * self.loss(self.model(batch[0]), batch[1])

        training_step = compute_loss
        doubled = functools.partialmethod(compute_loss, scale=2.0)

    assert make(Mine).fit(pieces(), epochs=1).updates == 4


def test_a_variable_that_is_set_after_the_class_is_no_hindrance():
    class Mine(Trainer):
        def compute_loss(self, batch):
            return self.loss(self.model(batch[0]), batch[1])

        def training_step(self, batch):
            seen.append(len(batch))
            return self.compute_loss(batch)

    made = make(Mine)
    seen = []
    assert made.fit(pieces(), epochs=1).updates == 4 and seen


@pytest.mark.parametrize("name", ["on_plateau", "forward", "val_step", "prediction_step"])
def test_a_method_by_the_name_of_an_event_that_the_class_itself_calls_is_the_users_helper(name):
    called = []

    hook = {"end_epoch": eval(f"lambda self, metrics: self.{name}()"), name: lambda self: called.append(name)}
    make(type("Mine", (Trainer,), hook)).fit(pieces(), epochs=1)
    assert called == [name]


def test_a_method_that_only_calls_itself_is_refused():
    def setup(self):
        return super(Trainer, self).setup()

    with pytest.raises(TypeError, match=r"Mine\.setup is a method of other libraries"):
        make(type("Mine", (Trainer,), {"setup": setup}))


def test_what_is_no_method_may_have_any_name():
    assert type("Mine", (Trainer,), {"train_dataloader": [1], "setup": None}).train_dataloader == [1]


@pytest.mark.parametrize("name", FOREIGN_ATTRIBUTES)
def test_an_attribute_of_another_trainer_says_the_name_here(name):
    trainer = make()
    with pytest.raises(AttributeError) as caught:
        getattr(trainer, name)
    text = str(caught.value)
    assert text.startswith(f"'Trainer' object has no attribute {name!r}\n  fix   {FOREIGN_ATTRIBUTES[name]}\n")
    assert "where test_foreign_names.py:" in text
    assert not hasattr(trainer, name) and not hasattr(Trainer, name) and name not in dir(trainer)
    trainer_of_ones_own = make(type("Mine", (Trainer,), {"run": lambda self: self.__dict__.update({name: 3})}))
    trainer_of_ones_own.run()
    assert getattr(trainer_of_ones_own, name) == 3 and name in dir(trainer_of_ones_own)


def test_the_names_cost_other_attributes_nothing():
    """A `__getattr__` would: every attribute and method of the trainer would be looked up by slower code."""
    assert not any("__getattr__" in vars(cls) or "__getattribute__" in vars(cls) for cls in Trainer.__mro__[:-1])


@pytest.mark.parametrize("name", FOREIGN_ARGUMENTS)
def test_an_argument_of_another_library_says_what_to_write(name):
    trainer = make()
    for call in (lambda: make(**{name: 1}), lambda: trainer.fit(pieces(), epochs=1, **{name: 1})):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'") as caught:
            call()
        (note,) = caught.value.__notes__
        assert f"takes no '{name}'. Write {with_value(FOREIGN_ARGUMENTS[name], 1)}\n" in note


VALUES = {
    ("max_epochs", 3): "fit(..., epochs=3)",
    ("num_train_epochs", 3.0): "fit(..., epochs=3)",
    ("max_epochs", -1): "fit(..., epochs=10)",
    ("gradient_clip_val", 0.5): "Trainer(..., clip=0.5)",
    ("eval_steps", 200): "fit(..., validate=Updates(200))",
    ("val_check_interval", 0.25): "fit(..., validate=Updates(500))",
    ("check_val_every_n_epoch", 2): "fit(..., validate=Epochs(2))",
    ("bf16", True): 'Trainer(..., precision="bf16")',
    ("fp16", True): 'Trainer(..., precision="fp16")',
    ("ema", True): "Trainer(..., average=EMA(0.999))",
    ("monitor", "val_accuracy"): 'Checkpoint(..., best="val_accuracy")',
    ("output_dir", "logs"): 'Checkpoint("logs", ...)',
    ("output_dir", None): 'Checkpoint("runs/1", ...)',
}


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_the_line_to_write_has_the_users_own_value_where_that_is_of_its_kind(name, value):
    with pytest.raises(TypeError) as caught:
        make(**{name: value})
    assert caught.value.__notes__[0].splitlines()[0].endswith(f". Write {VALUES[name, value]}")


def test_a_share_of_a_run_is_carried_over():
    with pytest.raises(TypeError) as caught:
        OneCycle(0.1, pct_start=0.2)
    assert "OneCycle takes no 'pct_start'. Write warmup=0.2   # a share of the run\n" in caught.value.__notes__[0]


def test_several_arguments_have_a_line_each():
    with pytest.raises(TypeError) as caught:
        make(args={}, max_epochs=3, zzz=1)
    lines = caught.value.__notes__[0].splitlines()
    assert lines[0].startswith("trainwright: Trainer takes no 'args'. Write Trainer(..., precision=")
    assert lines[1] == "             Trainer takes no 'max_epochs'. Write fit(..., epochs=3)"
    assert lines[2] == "             Trainer takes no 'zzz'"


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in FOREIGN_ATTRIBUTES_OF.items() for name in names])
def test_an_attribute_of_another_librarys_slot_says_where_it_is(of, name):
    slot = {"Checkpoint": Checkpoint("runs/1"), "EarlyStopping": EarlyStopping("val_loss")}[of]
    with pytest.raises(AttributeError) as caught:
        getattr(slot, name)
    text = str(caught.value)
    assert text.startswith(f"{of!r} object has no attribute {name!r}\n  fix   {FOREIGN_ATTRIBUTES_OF[of][name]}\n")
    assert "where test_foreign_names.py:" in text
    with pytest.raises(AttributeError, match=rf"^'{of}' object has no attribute 'zzz'$"):
        getattr(slot, "zzz")  # noqa: B009


def test_a_number_that_is_logged_under_the_name_of_validation_says_the_name_to_write():
    class Mine(Trainer):
        def validation_step(self, batch):
            self.log(self.name, 1.0)
            return self.loss(self.model(batch[0]), batch[1])

    trainer = make(Mine)
    trainer.name = "val_acc"
    with pytest.raises(SettingError, match="logged name 'val_acc'") as caught:
        trainer.fit(pieces(), pieces(1), epochs=1)
    assert """  fix   "acc": validation reports it as 'val_acc'\n""" in str(caught.value)
    trainer = make(Mine)
    trainer.name = "acc"
    assert trainer.fit(pieces(), pieces(1), epochs=1).history[-1]["val_acc"] == 1.0


@pytest.mark.parametrize("name", ["loss", "val_loss"])
def test_a_loss_that_validation_logs_is_returned_instead(name):
    class Logs(Trainer):
        def validation_step(self, batch):
            self.log(name, self.loss(self.model(batch[0]), batch[1]))

    class Returns(Trainer):
        def validation_step(self, batch):
            loss = self.loss(self.model(batch[0]), batch[1])
            return loss

    with pytest.raises(SettingError, match=rf"logged name '{name}'") as caught:
        make(Logs).fit(pieces(), pieces(1), epochs=1)
    assert entry(str(caught.value), "fix").startswith("return loss instead of this call")
    assert "val_loss" in make(Returns).fit(pieces(), pieces(1), epochs=1).history[-1]


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_the_name_that_an_error_proposes_for_a_metric_is_accepted(name):
    for given in (name, f"val_{name}"):
        with pytest.raises(SettingError) as caught:
            make(metrics={given: trainwright.accuracy})
        proposed = ast.literal_eval(entry(str(caught.value), "fix").partition(":")[0])
        assert f"val_{proposed}" in make(metrics={proposed: trainwright.accuracy}).evaluate(pieces(1))


@pytest.mark.parametrize("metric", [F1(), F1, MAE(), trainwright.accuracy])
def test_a_metric_object_that_is_logged_belongs_in_metrics(metric):
    class Logs(Trainer):
        def training_step(self, batch):
            self.log("mine", metric)
            return self.loss(self.model(batch[0]), batch[1])

    with pytest.raises(SettingError, match="'mine' is a ") as caught:
        make(Logs).fit(pieces(), epochs=1)
    fix = 'Trainer(..., metrics={"mine": ...}), and return StepOutput(loss, output, target)'
    assert entry(str(caught.value), "fix") == fix


def test_a_function_in_the_place_of_the_dict_of_metrics_is_given_a_name():
    def compute_metrics(outputs, targets):
        return float((outputs.argmax(1) == targets).float().mean())

    with pytest.raises(TypeError, match=r"^metrics=<function ") as caught:
        make(metrics=compute_metrics)
    first, _, second = entry(str(caught.value), "fix").partition(", or ")
    names = {"accuracy": trainwright.accuracy, "over_all": trainwright.over_all, "fn": compute_metrics}
    assert second == 'metrics={"name": over_all(fn)} for a function fn(outputs, targets) of all rows'
    for code in (first, second.partition(" for ")[0]):
        metrics = eval(code.removeprefix("metrics="), names)
        assert {f"val_{name}" for name in metrics} <= set(make(metrics=metrics).evaluate(pieces(1)))


def test_self_that_is_called_as_the_model_gets_the_name_of_the_model():
    class Calls(Trainer):
        def training_step(self, batch):
            return self.loss(self(batch[0]), batch[1])

    note = noted(make(Calls), pieces(), TypeError)
    assert "self is the Calls, not the model" in entry(note, "why")
    assert entry(note, "fix") == "self.model(x)"


def test_an_object_of_ones_own_that_cannot_be_called_is_not_taken_for_self():
    class Calls(Trainer):
        def training_step(self, batch):
            return self.progress(batch)

    assert "self.model" not in noted(make(Calls), pieces(), TypeError)


CALLED = {
    "Trainer.predict": lambda **given: make().predict(pieces(), **given),
    "Trainer.evaluate": lambda **given: make().evaluate(pieces(), **given),
    "Trainer.report": lambda **given: make().report(pieces(), **given),
    "Trainer.fit": lambda **given: make().fit(pieces(), epochs=1, **given),
    "Trainer.log": lambda **given: make().log("x", 1.0, **given),
    "Trainer.save": lambda **given: make().save(**given),
    "batches": lambda **given: trainwright.batches(torch.ones(4, 2), 2, **given),
}


PACKAGES = (trainwright, trainwright.data, trainwright.observers, trainwright.schedules, trainwright.tools)


@pytest.mark.parametrize(("of", "name"), [(of, name) for of, names in FOREIGN_ARGUMENTS_OF.items() for name in names])
def test_an_argument_of_another_librarys_function_says_what_to_write(of, name):
    call = CALLED.get(of) or next(getattr(one, of) for one in PACKAGES if of in one.__all__)
    with pytest.raises(TypeError) as caught:
        call(**{name: 1})
    (note,) = caught.value.__notes__
    instead = with_value(FOREIGN_ARGUMENTS_OF[of][name], 1)
    said = f"L{instead[1:]}" if instead.startswith("leave") else f"Write {instead}"
    assert note.startswith(f"trainwright: {of} takes no '{name}'. {said}\n")


@pytest.mark.parametrize("estimator", [trainwright.tools.SklearnClassifier, trainwright.tools.SklearnRegressor])
def test_an_estimator_says_its_own_name_and_what_to_write(estimator):
    for name, instead in {"devices": "Trainer(..., parallel=", "max_epochs": "epochs=2", "lrr": "'lr'?"}.items():
        with pytest.raises(TypeError) as caught:
            estimator(**{name: 2})
        first = caught.value.__notes__[0].splitlines()[0]
        assert f"{estimator.__name__} takes no {name!r}" in first and instead in first


@pytest.mark.parametrize("name", OWN_ARGUMENTS)
def test_an_argument_of_ours_given_elsewhere_says_where_it_belongs(name):
    with pytest.raises(TypeError) as caught:
        EMA(0.9, **{name: 1})
    assert f"EMA takes no '{name}'. Write {with_value(OWN_ARGUMENTS[name], 1)}\n" in caught.value.__notes__[0]


def test_a_path_given_to_save_says_what_to_write():
    with pytest.raises(TypeError) as caught:
        make().save("model.pt")
    assert 'Write trainer.save_weights("model.safetensors")' in caught.value.__notes__[0]


SECOND = {
    "epochs": (5, "fit(train, epochs=5), or batch_size=5"),
    "a share": (0.2, "train, val = trainwright.data.random_split(data, 0.2)"),
    "more than all": (1.5, "train, val = trainwright.data.random_split(data, 0.2)"),
}


@pytest.mark.parametrize("what", SECOND)
def test_a_number_in_the_place_of_validation_data_says_what_to_write(what):
    given, fix = SECOND[what]
    for call in (lambda: make().fit(pieces(), given), lambda: make().plan(pieces(), given, epochs=1)):
        with pytest.raises(SettingError, match=r"^fit\(train, ") as caught:
            call()
        assert f"  fix   {fix}\n" in str(caught.value)


def test_the_split_that_is_written_works():
    x, y = torch.randn(20, 4), torch.randint(0, 3, (20,))
    with pytest.raises(SettingError) as caught:
        make().fit((x, y), val=0.25, epochs=1)
    code = str(caught.value).partition("  fix   ")[2].splitlines()[0]
    names = {"trainwright": trainwright, "data": (x, y)}
    exec(code, names)
    assert (len(names["train"][0]), len(names["val"][0])) == (15, 5)
    assert "val_loss" in make().fit(names["train"], names["val"], epochs=1, batch_size=5).history[0]


def looped(times=3, data=None, **settings):
    stream = io.StringIO()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=Console(stream, width=200), **settings)
    for _ in range(times):
        trainer.fit(pieces() if data is None else data, pieces(), epochs=1)
    return [line for line in stream.getvalue().splitlines() if "in a loop" in line]


def test_a_loop_of_fits_gets_one_line_where_a_slot_starts_anew():
    (line,) = looped(schedule=Cosine())
    assert line.startswith("fit(epochs=1) in a loop (test_foreign_names.py:")
    assert line.endswith("): the schedule starts anew with each fit: write fit(epochs=n)") and len(line) < 120
    (line,) = looped(early_stopping=EarlyStopping("val_loss"))
    assert "the early stopping starts anew" in line
    assert (
        "the schedule and early stopping start anew"
        in looped(early_stopping=EarlyStopping("val_loss"), schedule=Cosine())[0]
    )


def rows():
    return torch.randn(8, 4), torch.tensor([0, 1, 2, 1] * 2)


@pytest.mark.parametrize("seed", [0, None])
def test_a_loop_of_fits_says_that_a_shuffled_order_starts_anew_and_so_it_does(seed):
    seen = []

    class Sees(Trainer):
        def training_step(self, batch):
            seen.append(batch[0])
            return super().training_step(batch)

    data = batches(rows(), 4, shuffle=True, seed=seed)
    (line,) = looped(data=data)
    assert line.endswith("): the order of the data starts anew with each fit: write fit(epochs=n)")
    trainer = make(Sees)
    for _ in range(2):
        trainer.fit(data, epochs=1)
    assert torch.equal(torch.cat(seen[:2]), torch.cat(seen[2:]))
    assert looped(data=batches(rows(), 4)) == []
    assert looped(data=DataLoader(TensorDataset(*rows()), 4, shuffle=True)) == []


def test_other_fits_get_no_such_line():
    assert looped(times=1, schedule=Cosine()) == looped() == []
    stream = io.StringIO()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    console = Console(stream, width=200)
    trainer = Trainer(model, optimizer, nn.CrossEntropyLoss(), console=console, schedule=Cosine())
    trainer.fit(pieces(), epochs=1)
    trainer.fit(pieces(), epochs=1)
    for _ in range(2):
        trainer.fit(pieces(), epochs=2)
    assert "in a loop" not in stream.getvalue()


@pytest.mark.parametrize("fix", sorted(set(map(with_value, FOREIGN_ARGUMENTS.values()))))
def test_what_is_written_instead_is_taken(fix, tmp_path):
    """Every keyword in it is one of Trainer's, of fit's or of Checkpoint's."""
    if fix.startswith("Checkpoint("):
        code = fix.replace("(..., ", "(tmp_path, ").replace(", ...)", ")")
        assert eval(code, {"Checkpoint": Checkpoint, "Updates": Updates, "Epochs": Epochs, "tmp_path": tmp_path})
        return
    taken = {**inspect.signature(Trainer).parameters, **inspect.signature(Trainer.fit).parameters}
    code = fix if fix.endswith("))") or "(...," in fix or fix.startswith(("fit(", "Trainer(")) else f"Trainer({fix})"
    call = ast.parse(code.replace("...,", "None,")).body[0].value
    assert call.func.id in ("Trainer", "fit")
    assert {keyword.arg for keyword in call.keywords} <= set(taken)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"save_top_k": 3}, 'Write Checkpoint(..., best="val_loss", top=3)'),
        ({"directory": "x", "every_n_train_steps": 5}, "Write Checkpoint(..., every=Updates(5))"),
        ({"dirpath": "x"}, 'Write Checkpoint("x", ...)'),
        ({"directory": "x", "evry": 5}, "Did you mean 'every'?"),
        ({}, "other arguments than it takes"),
    ],
)
def test_an_argument_that_a_checkpoint_does_not_take_says_what_to_write(given, said):
    with pytest.raises(TypeError) as caught:
        Checkpoint(**given)
    (note,) = caught.value.__notes__
    assert note.startswith("trainwright: Checkpoint ") and said in note
    assert "  by position  directory\n  by name      best, mode, top, keep, every," in note
    assert "where        test_foreign_names.py:" in note


def test_a_checkpoint_stays_a_plain_record():
    slot = Checkpoint("x", every=Updates(5))
    assert slot == copy.deepcopy(slot) == pickle.loads(pickle.dumps(slot)) == replace(slot) != replace(slot, keep=2)
    assert hash(slot) == hash(replace(slot)) and eval(repr(slot)) == slot
    assert list(inspect.signature(Checkpoint).parameters) == [one.name for one in fields(slot)]
    with pytest.raises(FrozenInstanceError):
        slot.keep = 5
    with pytest.raises(SettingError, match="keep=0"):
        replace(slot, keep=0)


class Forgets(Trainer):
    def __init__(self, model):
        self.model = model


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_a_class_that_forgets_the_init_of_its_base_says_so(call):
    arguments = {"epochs": 1} if call == "fit" else {}
    with pytest.raises(TypeError, match=r"^Forgets\.__init__ does not call the one of its base") as caught:
        getattr(Forgets(network()), call)(pieces(), **arguments)
    fix = str(caught.value).partition("  fix   ")[2].partition(" in it")[0]
    assert fix == "super().__init__(model, optimizer, ...)"


def test_an_attribute_of_ones_own_that_is_missing_stays_an_attribute_error():
    class Lacks(Trainer):
        def training_step(self, batch):
            return self.weighing

    with pytest.raises(AttributeError, match="weighing"):
        make(Lacks).fit(pieces(), epochs=1)


SPANS = {
    r"Probe\(every=50\)": lambda every: Probe(print, every=every),
    r"Checkpoint\(every=50\)": lambda every: Checkpoint("runs/1", every=every),
    r"validate=50": lambda every: make().fit(pieces(), pieces(1), epochs=1, validate=every),
    r"Every\.every=50": lambda every: make(
        observers=[type("Every", (Observer,), {"every": every, "on_update": lambda self, update: None})()]
    ).fit(pieces(), epochs=1),
}


@pytest.mark.parametrize("says", SPANS)
def test_a_bare_number_for_a_span_gets_its_unit(says):
    with pytest.raises(SettingError, match=f"^{says}\n  want  .*Updates") as caught:
        SPANS[says](50)
    fix = str(caught.value).partition("  fix   ")[2].splitlines()[0]
    assert fix.rpartition("every=")[2].rpartition("validate=")[2] == "Updates(50)"
    for span in (Updates(50), Seconds(60)):
        SPANS[says](span)


@pytest.mark.parametrize(
    ("wrong", "slot"),
    [
        (EarlyStopping("val_loss"), "early_stopping"),
        (Checkpoint("runs/1"), "checkpoint"),
        (Cosine(), "schedule"),
    ],
)
def test_a_slot_among_the_observers_says_where_it_belongs(wrong, slot):
    with pytest.raises(TypeError, match=f"(?s)observers: {type(wrong).__name__}.* is no Observer.*fix   {slot}="):
        make(observers=[wrong])
    make(**{slot: wrong})


def test_the_class_of_an_observer_is_no_observer():
    with pytest.raises(TypeError, match=r"(?s)observers: .*Journal.*fix   Journal\(\.\.\.\)"):
        make(observers=[Journal])


@pytest.mark.parametrize("name", ["fast_path", "history", "result", "world"])
def test_a_method_with_the_name_of_an_attribute_is_refused(name):
    with pytest.raises(TypeError, match=f"Mine.{name}: the Trainer has an attribute of this name"):
        type("Mine", (Trainer,), {name: lambda self: None})


@pytest.mark.parametrize("name", ["_counters", "_tracker", "_record", "_hooks", "history", "state"])
def test_a_replaced_attribute_of_the_trainer_is_refused_before_the_first_update(name):
    model = nn.Linear(2, 1)
    before = [p.clone() for p in model.parameters()]
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), console=False)
    kept = getattr(trainer, name)
    setattr(trainer, name, 7)
    rows = [(torch.ones(3, 2), torch.ones(3, 1))]
    with pytest.raises(
        SettingError, match=rf"self.{name} was replaced(.|\n)*self.my_{name.removeprefix('_')} = "
    ) as caught:
        trainer.fit(rows, epochs=1)
    assert "where test_foreign_names.py" in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    setattr(trainer, name, kept)
    assert trainer.fit(rows, epochs=1).updates == 1
