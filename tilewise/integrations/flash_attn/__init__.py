"""The names and semantics of the package flash_attn, on tilewise: on every device, in fp32 and fp64 too.

`import tilewise.integrations.flash_attn as flash_attn` serves code that was written for it. What differs:

- the log-sum-exp that `return_attn_probs=True` returns is differentiable; the third value, the matrix after dropout, is
  never there: it is None, and with dropout the call is a ValueError;
- dropout has our own random bits, `torch.manual_seed` repeats them; `block_table` is a ValueError;
- with `deterministic=False` gradients are still bit-reproducible where that costs nothing, and under
  `torch.use_deterministic_algorithms(True)`;
- head sizes of any number, also of v alone; a row that sees no key has lse = -inf (and gives 0, as there).

The layers, losses and fused operators of that package are not here.
"""

from . import bert_padding, flash_attn_interface
from .cache import flash_attn_with_kvcache
from .flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__version__ = "2.8.3"  # of the package whose names and semantics these are: code asks for it

__all__ = [
    "bert_padding",
    "flash_attn_func",
    "flash_attn_interface",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
