from trainwright.data.row_batches import Batches
from trainwright.data.sharding import shard, sharded
from trainwright.data.splitting import random_split
from trainwright.data.transforms.bucketing import Bucketed, bucketed
from trainwright.data.transforms.normalize import Normalize
from trainwright.data.transforms.padding import Pad, pad
from trainwright.data.transforms.zipped import Together, together
from trainwright.distributed.mesh import Slice

__all__ = [
    "Batches",
    "Bucketed",
    "Normalize",
    "Pad",
    "Slice",
    "Together",
    "bucketed",
    "pad",
    "random_split",
    "shard",
    "sharded",
    "together",
]
