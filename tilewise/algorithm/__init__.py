"""The paper, executable, in plain torch: FlashAttention's algorithms, counted in bytes, and the backend "tiled"."""
