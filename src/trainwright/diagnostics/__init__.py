"""Why did a step fail? Notes on exceptions, the origin of a NaN, and warnings about the first batch.

- `explain.py`: adds one note to an exception of a step: which batch, its shapes, why it failed, what to write instead.
- `frames.py`: reads the traceback once into a `Failure`, the record of facts that rules read.
- `rules.py`: the table of rules. **To explain another error, write a function that takes a `Failure` and returns an
  `Explanation`, and add its line to `RULES` at the end of that file**; docs/errors.md has a worked example.
- `not_finite.py`: finds where a loss or a gradient stopped being finite: batch, weights, forward or backward.
- `first_batch.py`: warns in the first update of outputs that a loss does not take, such as probabilities for logits.

Nothing but `explain.py` and `first_batch.py` is imported before there is an error. Type, message and traceback of the
user's exception stay as they are, and no error of a rule replaces it.
"""
