"""Why did a step fail? Notes on exceptions, the origin of a NaN, and warnings about the first batch.

- `rules.py`: the rules that explain errors, each of which recognizes one cause and names the fix, and their table; its
  docstring shows how to add a rule in three steps.
- `frames.py`: reads the traceback once into a `Failure`, the record of facts that rules read.
- `explain.py`: adds one note to an exception of a step: which batch, its shapes, the cause and the fix.
- `not_finite.py`: finds where a loss or a gradient stopped being finite: batch, weights, forward or backward.
- `first_batch.py`: warns in the first update of outputs that a loss does not take, such as probabilities for logits.

Only `explain.py` and `first_batch.py` are imported before there is an error. Type, message and traceback of the user's
exception do not change, and no error of a rule replaces it.
"""
