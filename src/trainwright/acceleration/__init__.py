"""Makes a run faster without changing a result: which settings do so, and how they are applied and undone.

Files in reading order:
`fast.py`: `Fast`, the settings.
`switches.py`: applies the settings when a run begins, undoes them at its end, and names the path of its updates; the
layout of convolutions, and cuDNN's choice of algorithms by timing.
`compilation.py`: compiles regions of a model in place.
`device_dataset.py`: data in memory, copied to the accelerator for the length of a run.
`transfer.py`: copies batches to the accelerator while the step before computes.
`oom.py`: runs a window again in smaller micro-batches when memory runs out.

By default on CUDA: batches are copied ahead (`transfer`; not with a `to_device` of the user's own); optimizers that
the Trainer makes have fused kernels, cuDNN times its convolutions, and weights are channels-last under bf16 or fp16
(`Fast(defaults=False)` turns these off); data in memory is copied to the device if it takes at most a quarter of the
free memory (`Fast(device_data=False)`); checks are read later (`update/deferred_check.py::why_immediate` has the
reasons against). On the CPU: fused kernels. Never by default: autocast, TF32, compiling.

Promises: results are those of the plain path, but for the order of floating-point additions; after `fit` every module
and every switch of torch is as before. The CUDA paths have not run on a GPU yet.
"""
