"""In which number formats does a trainer compute? Autocast, loss scale, switches of the process.

Files in reading order:
`base`: `Precision` and `LossScale`, whose methods do nothing; a precision of your own is a subclass.
`mixed_precision`: `MixedPrecision` ("bf16", "fp16", "tf32") and `LossScaler`, with the rules of torch's GradScaler.
`autocast`: contexts that shield a run or an evaluation from the grad mode and autocast of the calling code.

Promises: steps run under autocast, `backward` and the optimizer outside of it; no switch of the process stays changed
after a `fit` or an evaluation; an update whose scaled gradient overflows is skipped, and weights stay float32.
"""

from trainwright.core.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
