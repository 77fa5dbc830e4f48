"""The run-time arguments that all kernels share, in their order: what is asked, as pointers and numbers."""

from __future__ import annotations

RUN_TIME = [
    "batch", "heads", "group", "q_len", "k_len", "together", "scale", "softcap", "left", "right", "threshold",
    "inverse_keep", "b0", "h0", "i0", "j0", "q_b", "q_h", "q_r", "k_b", "k_h", "k_r", "v_b", "v_h", "v_r", "do_b", "do_h",
    "do_r", "slopes_b", "bias_b", "bias_h", "bias_r", "bias_c", "bias_q", "bias_k", "mask_b", "mask_h", "mask_r",
    "mask_c", "mask_q", "mask_k", "blocks_b", "blocks_h", "blocks_n", "blocks_m", "dbias_b", "dbias_h", "dbias_r",
    "dbias_c", "dlse_b", "dlse_h", "dlse_r",
]  # fmt: skip
