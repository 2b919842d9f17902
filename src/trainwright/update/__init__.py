"""One update: how a window of micro-batches becomes one step of the optimizers, and what is refused on the way.

In order of a call, from `Trainer.update`:

- `window`: `Window` groups the micro-batches; `Window.weight` computes the weight of each loss, count / total.
- `strategy`: `UpdateStrategy`, the object that a run calls for each stage of an update. `fit/run.py::choose_strategy`
  makes one before the first update: `UpdateStrategy` itself (the CPU, or a reason of `why_immediate`), `DeferredCheck`
  (CUDA with fused optimizers), `DeferredSkip` (there with fp16 or "skip") or `DistributedCheck` (several ranks: it
  averages gradients first, and `ShardedWindow` is its part of a window; with `per_rank_state`). `ManualUpdate` is
  around the `update` of a user.
- `trainer_like`: what a run reads of its Trainer, and which methods the user overrides.
- `batches`: the default step: batch -> inputs and target -> output -> loss.
- `loss_tracker`: `LossTracker.backward_args` turns the return of a step into a recorded number and the arguments of
  `torch.autograd.backward`: the loss, and its weight as `grad_tensor`. `losses`: the counts of torch's own losses.
  `running_means`: numbers are recorded, read together and averaged.
- `UpdateStrategy.finish_backward`, after the last `backward`: all-reduces the gradients (`distributed_check`), finds
  the factor that they lack. `unscale_and_check` applies it in the pass that flags NaN and inf (`optim/gradients.py`).
- `optimizer_steps`: norm, clip and step of each optimizer. `manual_optimization`: `minimize`, closures, own updates.
- `UpdateStrategy.check` reads loss, flag and norms before the step. `nonfinite_policy`: what a NaN leads to.
  `deferred_check`: the same decided on the device, and read by the host some updates later.
- `snapshot`: copies from before the update, which `fit/run.py::Run.finish_update` restores if it is not applied.
  `reporter`: the record of the update.

Promises: the gradient of a window is that of one big batch, whatever it is cut into. Unless the policy is "ignore", an
update that is not finite changes no weight and no optimizer state. A check reads all numbers of an update at once; a
deferred one never waits for the newest. Every number is an exact mean over its counts, and a NaN in it shows.
"""
