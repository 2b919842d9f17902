"""One `fit`: where it starts, which work falls due between updates, and how it ends.

Reading order: `plan` (the arithmetic of the run and its contradictions), `context` (enter and leave a `fit`), `stages`
and `record` (one record per `fit`), `run` (windows in, applied updates out), `boundary` (validate, compare, report,
save), `clock` (the ends), `saving` (everything with state), `result` (best weights, the Result). A resume: `resume`
(its plan, then its execution). An end by an error or a signal: `rescue`, `rollback`. Several ranks: `rank_sync`.
`arguments` checks those of a Trainer, `opening` opens data, `describe` gives settings as text, `inspection` measures a
run for observers.

Every contradiction of settings is raised before the first update; a `fit` that is refused leaves the trainer as its
last `fit` did; however a run ends, all that entering has switched is undone, and observers get their `on_fit_end`.
"""
