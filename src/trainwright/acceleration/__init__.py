"""Makes a run faster without changing a result: which settings do so, and how they are applied and undone.

Files in reading order:
`fast.py`: `Fast`, the settings.
`switches.py`: applies the settings when a run begins, undoes them at its end, and names the path of its updates.
`compilation.py`: compiles regions of a model in place, and stores compiled code from run to run.
`layout.py`: weights of convolutions in channels-last layout; cuDNN's choice of algorithms by timing.
`device_dataset.py`: data in memory, copied to the accelerator for the length of a run.
`transfer.py`: copies batches to the accelerator while the step before computes.
`oom.py`: runs a window again in smaller micro-batches when memory runs out.

Promises: results are those of the plain path within the tolerances of the law Same; after `fit` every module and every
switch of torch is as before. What is for CUDA alone has not run on a GPU yet.
"""
