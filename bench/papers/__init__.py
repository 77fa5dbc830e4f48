"""The tables and figures of the FlashAttention papers, measured again: `python -m bench.papers`."""
