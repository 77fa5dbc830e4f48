"""What the page says about a step: a short sentence, and where it helps, why the step is there."""

from __future__ import annotations

from .recording import MATRICES, OF_KEYS, Kind

VERBS = {"load": "Load", "store": "Store", "accumulate": "Add to", "fill": "Fill in HBM:"}

# What is computed on the chip: "algorithm direction names"
COMPUTED = {
    "standard forward S": "Compute S_ij = Q_i K_jᵀ",
    "standard forward O": "Compute O_i += P_ij V_j",
    "standard backward dV": "Compute dV_j += P_ijᵀ dO_i",
    "standard backward dP": "Compute dP_ij = dO_i V_jᵀ",
    "standard backward dQ": "Compute dQ_i += dS_ij K_j",
    "standard backward dK": "Compute dK_j += dS_ijᵀ Q_i",
    "flash1 forward S": "Compute S_ij = Q_i K_jᵀ and P_ij = exp(S_ij − m_ij); rescale O_i and l_i, add the tile's part",
    "flash1 backward dK dV": "Begin with dK_j = dV_j = 0 on the chip",
    "flash1 backward S": "Recompute S_ij = Q_i K_jᵀ and P_ij = exp(S_ij − m_i) / l_i; dV_j += P_ijᵀ dO_i",
    "flash1 backward dP": "Compute dP_ij = dO_i V_jᵀ, then dS_ij; add to dQ_i and dK_j",
    "flash2 forward O": "Begin with O_i = 0, l_i = 0, m_i = −∞ on the chip",
    "flash2 forward S": "Compute S_ij = Q_i K_jᵀ",
    "flash2 forward m l O": "Compute P_ij = exp(S_ij − m_i); rescale l_i and O_i, add the tile's part P_ij V_j",
    "flash2 backward dK dV": "Begin with dK_j = dV_j = 0 on the chip",
    "flash2 backward S": "Recompute S_ij = Q_i K_jᵀ and P_ij = exp(S_ij − L_i)",
    "flash2 backward dP": "Compute dP_ij = dO_i V_jᵀ; dV_j += P_ijᵀ dO_i",
    "flash2 backward dQ": "Compute dS_ij = P_ij (dP_ij − delta_i); dK_j += dS_ijᵀ Q_i; this tile's part of dQ_i",
}

# "algorithm direction op first-name"
REASONS = {
    "standard forward store S": "The next kernel starts with an empty chip, so all N × N scores must go to HBM.",
    "standard forward load S": "The scores that an earlier kernel wrote come back, all N × N of them.",
    "standard forward store P": "P is as large as S, and goes the same way.",
    "standard forward load P": "P comes back once more, for the last product.",
    "standard backward load P": "P was kept in HBM since the forward: N × N numbers of memory.",
    "standard backward store dP": "dP, N × N again, goes to HBM between two kernels.",
    "standard backward store dS": "dS, N × N, goes to HBM: the next kernels need it.",
    "standard backward load dS": "dS comes back from HBM, for each kernel that needs it.",
    "flash1 forward fill O": "O, l and m live in HBM here, so they start there.",
    "flash1 forward load K": "Outer loop: these keys and values are loaded once and stay for all queries.",
    "flash1 forward load Q": "Inner loop: the queries go by, with the state that their rows have reached.",
    "flash1 forward compute S": "S and P exist on the chip only, one tile at a time: they never cross to HBM.",
    "flash1 forward store O": "O, l and m go back after every tile. FlashAttention-2 spares just that.",
    "flash1 backward load K": "Outer loop: these keys and values are loaded once; their gradients stay on the chip.",
    "flash1 backward load Q": "Inner loop: all that belongs to these queries goes by.",
    "flash1 backward compute S": "P was never stored: to compute it again is cheaper than to read it from HBM.",
    "flash1 backward store dQ": "dQ goes through HBM at each turn, as O does in the forward.",
    "flash1 backward store dK": "Done with these keys: their gradients are written once.",
    "flash2 forward load Q": "Outer loop: these queries are loaded once, and their m, l and O stay on the chip.",
    "flash2 forward load K": "Inner loop: the keys go by.",
    "flash2 forward compute S": "S exists on the chip only: it never crosses to HBM.",
    "flash2 forward compute m": "What was summed relative to the old maximum shrinks by exp(m_old − m_new).",
    "flash2 forward store O": "The row of tiles is done: one division by l, and O is written once.",
    "flash2 forward store L": "One number a row, L = m + log l, is all that the backward needs to make P again.",
    "flash2 backward load O": "A pass of its own: delta = rowsum(dO ∘ O), one number a row.",
    "flash2 backward load K": "Outer loop: these keys and values are loaded once; their gradients stay on the chip.",
    "flash2 backward load Q": "Inner loop: all that belongs to these queries goes by.",
    "flash2 backward compute S": "P was never stored: to compute it again is cheaper than to read it from HBM.",
    "flash2 backward accumulate dQ": "Each key tile adds its part to dQ in HBM (in fp32): a load and a store.",
    "flash2 backward store dK": "Done with these keys: their gradients are written once.",
}

# What a kernel of standard attention is for
KERNELS = {
    "scores": "S = Q Kᵀ", "scale": "S = scale · S", "mask": "S = mask(S)", "softmax": "P = softmax(S)",
    "output": "O = P V", "dV": "dV = Pᵀ dO", "dP": "dP = dO Vᵀ",
    "softmax_backward": "dS = P ∘ (dP − rowsum(P ∘ dP))", "mask_backward": "dS = mask(dS)",
    "scale_backward": "dS = scale · dS", "dQ": "dQ = dS K", "dK": "dK = dSᵀ Q",
    "forward": "the whole forward in one kernel", "backward": "the whole backward in one kernel",
    "delta": "delta = rowsum(dO ∘ O)",
}  # fmt: skip


def caption(algorithm: str, direction: str, kind: Kind) -> tuple[str, str]:
    """(sentence, reason or "") of a step's kind; _i, _j and _ij mark subscripts.

    >>> caption("flash1", "forward", Kind("load", ("K", "V"), "forward", (64, 64), (0, 0)))[0]
    'Load K_j, V_j'
    """
    if kind.op == "compute":
        text = COMPUTED[" ".join((algorithm, direction, *kind.names))]
    else:
        names = [name if kind.op == "fill" else subscripted(name) for name in kind.names]
        text = f"{VERBS[kind.op]} {', '.join(names)}" + (" in HBM" if kind.op == "accumulate" else "")
    return text, REASONS.get(f"{algorithm} {direction} {kind.op} {kind.names[0]}", "")


def subscripted(name: str) -> str:
    """
    >>> subscripted("Q"), subscripted("dK"), subscripted("S")
    ('Q_i', 'dK_j', 'S_ij')
    """
    return f"{name}_{'ij' if name in MATRICES else 'j' if name in OF_KEYS else 'i'}"
