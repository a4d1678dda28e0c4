"""Tensor parallelism against PyTorch's: DTensor's parallelize_module, plain and with SequenceParallel, and ours on the same ranks.

python bench/tensor_parallel.py --mbit 500                  # root: network namespaces shaped with tc
python bench/tensor_parallel.py                             # loopback, unshaped
python bench/tensor_parallel.py --mbit 1000 --rounds 5 --only dtensor,sequence,search --json out.json

All ranks work on one batch, methods take turns (bench/turns.py). A rank's part of the compute of one that does all is the compute of a
method. Wire time alone
is the bytes of the fewest transfers (behind each pair of products the sum of its results, forward and backward; what norms and the head
add is left out) over the measured duplex goodput. A step can be no shorter than the larger of both.
"""

from __future__ import annotations

import turns
from tensor_methods import TENSOR

CASE = {"hidden": 512, "layers": 8, "heads": 8, "inter": 1376, "vocab": 512, "tokens": 128, "rows": 16}
TINY = {"hidden": 64, "layers": 2, "heads": 4, "inter": 172, "vocab": 64, "tokens": 32, "rows": 4}


def wire_bytes(case: dict[str, int], ranks: int) -> float:
    """Per layer two sums forward and two backward, each scattered and gathered again."""
    activation = 4 * case["rows"] * case["tokens"] * case["hidden"]
    return case["layers"] * 4 * 2 * activation * (ranks - 1) / ranks


if __name__ == "__main__":
    peers = ("dtensor", "dtensor-sequence")
    turns.run(turns.Contest("tensor parallel", TENSOR, peers, CASE, TINY, wire_bytes, lambda whole, ranks: whole / ranks), __doc__)
