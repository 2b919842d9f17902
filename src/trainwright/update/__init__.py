"""One update: from a window of micro-batches to one step of the optimizers.

Files in the order of the calls from `Trainer.update`:

- `window.py`: `Window` groups micro-batches; `Window.weight` computes the weight of each loss, count / total.
- `strategy.py`: `UpdateStrategy`, whose methods a run calls at each stage of an update. `fit/run.py::choose_strategy`
  makes it before the first update: `UpdateStrategy` itself (on the CPU, or for a reason of `why_immediate`),
  `DeferredCheck` (CUDA with fused optimizers), `DeferredSkip` (the same with fp16 or "skip"), or `DistributedCheck`
  (several ranks: averages gradients first; uses `ShardedWindow` and `per_rank_state.py`). `ManualUpdate` wraps a
  custom `update`.
- `trainer_like.py`: the Trainer attributes that a run reads, and the methods that the user overrides.
- `batches.py`: the default step: batch -> inputs and target -> output -> loss.
- `loss_tracker.py`: `LossTracker.backward_args` records the return of a step, and returns the arguments of
  `torch.autograd.backward`: the loss, and its weight as `grad_tensor`. `losses.py`: the counts of torch's losses.
  `running_means.py`: numbers that are recorded, read together and averaged.
- `UpdateStrategy.finish_backward`, after the last `backward`: all-reduces the gradients (`distributed_check.py`) and
  computes their missing factor. `unscale_and_check` applies it in the pass that checks for NaN and infinity
  (`optim/gradients.py`).
- `optimizer_steps.py`: norm, clip and step of each optimizer. `manual_optimization.py`: `minimize`, closures, custom
  updates.
- `UpdateStrategy.check` reads loss, flag and norms before the step. `nonfinite_policy.py`: the policy for NaN and
  infinity. `deferred_check.py`: the same check on the device, read by the host some updates later.
- `snapshot.py`: copies from before the update, which `fit/run.py::Run.finish_update` restores if the update is not
  applied. `reporter.py`: the record of the update for observers.

Promises: the gradient of a window is that of one large batch, independent of the micro-batches. Unless the policy is
"ignore", a non-finite update changes neither weights nor optimizer state. A check reads all numbers of an update at
once; a deferred check never waits for the newest update. Every number is an exact mean over its counts and includes any
NaN.
"""
