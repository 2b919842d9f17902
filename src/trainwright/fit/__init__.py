"""One `fit`: its start, the work between its updates, and its end.

The modules in the order of a call:

1. `context` enters the `fit`. `opening` opens the data. `context` starts a stage and its `record`.
2. `plan` computes the header and refuses contradictory settings. `run` binds the slots and chooses the update strategy.
3. `context` reads the checkpoint of `resume=`. `resume` chooses the start and restores each part.
4. `trainer.py` gets the windows of an epoch from `run`, which compares their number with the plan.
5. `boundary` does the work between two updates: clock and ends, `inspection` (observers that measure), validation,
   `early_stopping`, and `saving` (everything with state).
6. `context` leaves the `fit`: by `result` (best weights, the Result), or, after an error or a signal, by `rollback`,
   which saves the state before the window in progress.

`rank_sync` exchanges requests between ranks. `arguments` checks the arguments of a Trainer when it is built.

Three promises: contradictory settings are refused before the first update; a refused `fit` leaves the trainer as the
last `fit` left it; at every end the switches of `context` are undone and observers get `on_fit_end`.
"""
