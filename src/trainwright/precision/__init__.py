"""The numeric precision of training: autocast, loss scale and process-wide switches.

Files in reading order:
`base.py`: `Precision` and `LossScale`, whose methods are no-ops; a custom precision is a subclass.
`mixed_precision.py`: `MixedPrecision` ("bf16", "fp16", "tf32"), and `LossScaler` with the rules of torch's GradScaler.
`autocast.py`: contexts that isolate a run or an evaluation from grad mode and autocast of the calling code.

Promises: steps run under autocast; backward and optimizer run outside of it. Process-wide switches are restored after a
`fit` or an evaluation. An update whose scaled gradient overflows is skipped, and weights stay float32.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
