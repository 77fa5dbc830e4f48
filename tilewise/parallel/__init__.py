"""Context parallelism: one sequence over many devices, with `torch.distributed`.

order      which tokens a rank holds: contiguous, or in zig-zag
plan       what a rank's queries see of another's keys, as few calls of a backend
ring       keys and values pass by; a step is a `merge`
ulysses    all-to-all: rows of all heads for all rows of some heads
exchange   tensors to and from other ranks while the device computes
agree      ranks tell each other what they are about to do: an error, not a hang
context    `ContextParallel`, the public class
"""

from .context import ContextParallel

__all__ = ["ContextParallel"]
