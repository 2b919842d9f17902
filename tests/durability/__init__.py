"""The law Durable: trainings are killed, their files torn, their disks filled and unplugged; then they must go on.

`python -m tests.durability --help` says how any library is driven through it by one small adapter file.
"""

import os

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy comes: a process with threads cannot be forked
