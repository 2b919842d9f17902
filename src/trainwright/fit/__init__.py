"""One `fit`: where it starts, which work falls due between updates, and how it ends.

In the order of a call: `context` enters it. `opening` opens the data, `context` starts a stage and its `record`, `plan`
computes the header and finds contradictions, `run` binds the slots and chooses how updates are made, `context` reads
the checkpoint that `resume=` names, and `resume` plans the start from it, then restores each part. `trainer.py` takes
the windows of an epoch from `run`, which compares their number with the plan.
At a `boundary` between updates: the clock and the ends, `inspection` (observers that measure), validation,
`early_stopping`, and `saving` (everything with state). `context` leaves it by `result` (best weights, the Result);
after an error or a signal by `rollback`, which saves the state from before the window in progress. Several ranks:
`rank_sync`. Outside of a `fit`: `arguments` checks those of a Trainer.

Every contradiction of settings is raised before the first update; a `fit` that is refused leaves the trainer as its
last `fit` did; however a run ends, all that entering has switched is undone, and observers get their `on_fit_end`.
"""
