"""What the Triton kernels of a Config may spill; what is not here claims to spill nothing.

Bytes by `launch.resources`, with Triton 3.7, of (Bands, BlockMasks, lengths, packed; all options), by the table in
`kernels/triton/config.py`, kernel, padded head sizes and bytes of an element. ANY: accumulators of so many columns are
beyond the registers; such heads are rare, and slow, not wrong.
"""

from __future__ import annotations

import math

ANY = math.inf
_SPILLS: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], tuple[float, float]] = {
    ("any", "forward", (16, 32, 64), (2, 4)): (0, 64),
    ("any", "forward", (128, 256, 512), (2, 4)): (ANY, ANY),
    # On sm75, by scalar products; elsewhere fp32 alone spills.
    ("any", "dkdv", (16, 32, 64), (2, 4)): (1536, 2304),
    ("any", "dkdv", (128, 256, 512), (2, 4)): (ANY, ANY),
    ("any", "dq", (16, 32, 64), (2, 4)): (1152, 2304),
    ("any", "dq", (128, 256, 512), (2, 4)): (ANY, ANY),
    ("any", "dbias", (16, 32, 64), (2, 4)): (64, 128),
    ("any", "dbias", (128, 256, 512), (2, 4)): (ANY, ANY),
    ("sm86", "forward", (16, 32, 64), (2,)): (16, 0),
    ("sm86", "forward", (128,), (2,)): (0, 128),
    ("sm86", "dkdv", (16, 32, 64), (2,)): (64, 512),
    ("sm86", "dkdv", (128,), (2,)): (16, 512),
    ("sm86", "dq", (16, 32, 64), (2,)): (128, 0),
    ("sm86", "dq", (128,), (2,)): (0, 64),
    ("sm80", "forward", (128,), (2,)): (0, 128),
    ("sm90", "forward", (16, 32, 64), (2,)): (0, 64),
    ("sm90", "forward", (128,), (2,)): (0, 1024),
    ("sm90", "forward", (256,), (2,)): (16, 0),
    ("sm90", "forward", (512,), (2,)): (64, 64),
    ("sm90", "forward", (16, 32, 64), (4,)): (896, 128),
    # dK, dV, S and dP of 64 keys or more fill the registers.
    ("sm90", "dkdv", (16, 32, 64), (2,)): (832, 512),
    ("sm90", "dkdv", (128,), (2,)): (640, 1024),
    ("sm90", "dkdv", (256,), (2,)): (1152, 128),
    ("sm90", "dkdv", (512,), (2,)): (0, 128),
    # 32 rows would spill a quarter of it, outside the loop, and take 1.17 times as long.
    ("sm90", "dkdv", (16, 32, 64), (4,)): (2400, 1600),
    ("sm90", "dq", (16, 32, 64), (2,)): (0, 512),
    ("sm90", "dq", (16, 32, 64), (4,)): (640, 256),
    ("sm90", "dq", (128,), (2,)): (96, 64),
    ("sm90", "dq", (256,), (2,)): (64, 128),
}  # fmt: skip
SPILLS = {
    (table, kernel, width, size): bytes
    for (table, kernel, widths, sizes), bytes in _SPILLS.items() for width in widths for size in sizes
}  # fmt: skip
