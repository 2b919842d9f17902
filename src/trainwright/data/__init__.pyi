from trainwright.data.row_batches import Batches
from trainwright.data.sharding import shard, sharded
from trainwright.data.transforms.augment import Augment, Draws, Normalize
from trainwright.data.transforms.bucketing import Bucketed, bucketed
from trainwright.data.transforms.padding import Nest, Pack, Pad, nest, pack, pad
from trainwright.data.transforms.prefetching import prefetch
from trainwright.data.transforms.zipped import Together, together
from trainwright.distributed.mesh import Slice

__all__ = [
    "Augment",
    "Batches",
    "Bucketed",
    "Draws",
    "Nest",
    "Normalize",
    "Pack",
    "Pad",
    "Slice",
    "Together",
    "bucketed",
    "nest",
    "pack",
    "pad",
    "prefetch",
    "shard",
    "sharded",
    "together",
]
