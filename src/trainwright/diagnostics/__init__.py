"""Explains failed steps: notes on exceptions, the origin of a NaN, warnings about the first batch.

- `rules.py`: the table of rules, each of which recognizes one cause and returns the fix; and how to add a rule.
- `frames.py`: reads the traceback once into a `Failure`, the facts for the rules.
- `explain.py`: adds one note to the exception of a step: the batch, its shapes, the cause and the fix.
- `not_finite.py`: finds the origin of a NaN or inf: batch, weights, forward or backward.
- `first_batch.py`: warns in the first update of outputs that do not fit the loss, such as probabilities for logits.

Only `explain.py` and `first_batch.py` are imported before an error. Type, message and traceback of the user's exception
do not change. An error in a rule never replaces it.
"""
