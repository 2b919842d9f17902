"""Makes a run faster without a change of its mathematics.

Files in reading order:

- `fast.py`: `Fast`, the settings.
- `switches.py`: applies the settings at the start of a run, and undoes them at its end; channels-last layout, cuDNN
  benchmark mode, the description of the update path.
- `compilation.py`: compiles regions of a model in place.
- `device_dataset.py`: copies in-memory data to the accelerator for the duration of a run.
- `transfer.py`: copies batches to the accelerator while the previous step computes.
- `oom.py`: repeats a window in smaller micro-batches when memory runs out.

Defaults on CUDA:

- batches are copied ahead (`transfer`), unless the user overrides `to_device`;
- fused kernels for optimizers built by the Trainer, cuDNN benchmark mode, and channels-last weights under bf16 or fp16;
  `Fast(defaults=False)` turns these off;
- in-memory data is copied to the device if it takes at most a quarter of the free memory; `Fast(device_data=False)`
  turns this off;
- finite checks are deferred (`update/deferred_check.py::why_immediate` lists the exceptions).

Default on the CPU: fused kernels. Never by default: autocast, TF32, compilation.

Promises: results equal those of the plain path up to the order of floating-point additions. After `fit`, all modules
and all switches of torch are restored. `docs/platforms.md` lists the platforms that were tested.
"""
