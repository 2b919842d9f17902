"""The table of rules that explain why a step failed; it is imported when one has.

To add a rule:

1. Write a function in `causes.py`: it takes a `Failure` (`frames.py`) and returns an `Explanation`, or None.
2. Add its line to `RULES`, with the conditions under which it is called: the class of the error, a part of its message,
   the layer or the loss that was called. The first explanation is shown, so a special rule stands above a general one.
3. Add a case to `tests/mistakes/test_causes.py`: the error, the cause, and the fix that works.
"""

from __future__ import annotations

from torch import nn

from trainwright.diagnostics import causes
from trainwright.diagnostics.causes import Explanation, Rule
from trainwright.diagnostics.frames import Failure

_DEVICE = ("device",)
_OF_DTYPES = (
    "same dtype",
    "should be the same",
    "expected scalar type",
    "does not match weight dtype",
    "same data type",
)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CLASS_LOSSES = ("cross_entropy", "nll_loss")
_BINARY_LOSSES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")

RULES = (
    Rule(causes.out_of_memory),
    Rule(causes.index_out_of_range_on_the_device, text=("device-side assert",)),
    Rule(causes.module_without_forward, error=NotImplementedError, text=('missing the required "forward"',)),
    Rule(causes.step_that_calls_backward, text=("backward through the graph a second time", "does not require grad")),
    Rule(causes.output_that_is_no_tensor, error=(TypeError, AttributeError)),
    Rule(causes.classes_of_another_dtype, loss=_CLASS_LOSSES),
    Rule(causes.classes_of_another_shape, loss=_CLASS_LOSSES),
    Rule(causes.classes_out_of_range, loss=_CLASS_LOSSES, error=IndexError),
    Rule(causes.rows_of_another_number, loss=_CLASS_LOSSES, text=("batch_size",)),
    Rule(causes.binary_targets_of_another_dtype, loss=_BINARY_LOSSES),
    Rule(causes.binary_targets_of_another_shape, loss=_BINARY_LOSSES),
    Rule(causes.no_probabilities, loss=_BINARY_LOSSES, text=("between 0 and 1",)),
    Rule(causes.model_on_several_devices, text=_DEVICE),
    Rule(causes.model_that_was_moved, text=_DEVICE),
    Rule(causes.batch_on_another_device, text=_DEVICE),
    Rule(causes.tensor_made_on_another_device, text=_DEVICE),
    Rule(causes.inputs_of_another_dtype, text=_OF_DTYPES, layer=(nn.Module,)),
    Rule(causes.one_row_under_batch_norm, text=("more than 1 value per channel",)),
    Rule(causes.index_outside_an_embedding, layer=(nn.Embedding,), error=IndexError),
    Rule(causes.weights_in_shards, text=("mixed torch.Tensor and DTensor",)),
    Rule(causes.features_of_a_linear, layer=(nn.Linear,), error=RuntimeError),
    Rule(causes.channels_of_a_convolution, layer=_CONVOLUTIONS, error=RuntimeError),
    Rule(causes.loss_without_a_graph, text=("does not require grad",)),
    Rule(causes.graph_of_an_earlier_batch, text=("backward through the graph a second time",)),
    Rule(causes.other_inputs_than_forward_takes, error=TypeError),
)
"""The rules, in the order in which they are tried."""


def explanation_of(failure: Failure) -> Explanation | None:
    """Return the explanation of the first rule that applies, or None where none does."""
    return next((found for rule in RULES if (found := rule.apply(failure)) is not None), None)
