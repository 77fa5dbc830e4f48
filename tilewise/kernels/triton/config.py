"""Tile sizes, warps and stages of the Triton kernels: a table with its evidence. Nothing is tuned at the first call.

Look-up: a row is asked of the tables in `ORDER` of the device's architecture, the nearest first; the last, "any", has
every row, and fits every GPU but those in UNFIT. Its key is the kernel, the padded head size (the greater of q's and v's) and the bytes of
an element. A row has two Configs. `plain` serves Bands, BlockMasks, lengths, packed layouts and sinks. `dressed` is
smaller and serves whatever works on each pair: a bias, ALiBi, a boolean mask, a softcap, dropout. Some rows have others
for what was measured apart: no Band, long sequences, windows in them, BlockMasks, a bias alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...problem import Layout, Problem


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel works on one tile. rows: of queries; keys: of keys; both powers of two from 16 to 128."""

    rows: int
    keys: int
    warps: int
    stages: int
    tma: bool = False  # loads by descriptors, where the tensors allow it (Hopper on)


@dataclass(frozen=True, slots=True)
class Row:
    """Whether a Config's kernels spill is in `tests/spills.py`: what is not there spills nothing."""

    plain: Config
    dressed: Config
    evidence: str
    full: Config | None = None  # instead of plain, without a Band
    long: Config | None = None  # instead of plain and full, for packed sequences and those of LONG keys or more
    packed: Config | None = None  # instead of long, for packed sequences under a Band with one bound
    window: Config | None = None  # instead of plain and long, for those under a Band with two bounds
    blocks: Config | None = None  # instead of plain, for a BlockMask
    bias: Config | None = None  # instead of dressed, for a bias alone

    def config(self, kind: str) -> Config:
        """The Config of one of KINDS."""
        if kind == "long full":
            return self.long or self.full or self.plain
        if kind == "packed":
            return self.packed or self.long or self.plain
        return getattr(self, kind) or (self.dressed if kind == "bias" else self.plain)


KINDS = ("plain", "dressed", "full", "long", "long full", "packed", "window", "blocks", "bias")
DIRECTIONS = ("forward", "dkdv", "dq", "dbias")
WIDTHS = (16, 32, 64, 128, 256, 512)
Table = dict[tuple[str, int, int], Row]  # by kernel, padded head size, bytes of an element


def _table(rows: dict[tuple[str, tuple[int, ...], tuple[int, ...]], Row]) -> Table:
    """A table whose rows each serve several head sizes and element sizes."""
    return {(name, w, size): row for (name, widths, sizes), row in rows.items() for w in widths for size in sizes}


_INTERPRETED = "Triton's interpreter: small, and sides that differ"
_MEASURED = "fastest of 11 to 64 on an H200, Triton 3.6, 2026-11-30 (python -m bench.tune)"
_ALONE = "fastest of 3 to 8 on an H200, Triton 3.6, 2026-11-30, each kernel timed alone"
_GUESSED = "not measured"
LONG = 2048
SPLIT = 64  # columns that fp32 tiles may have to be split in three bf16 parts (`steps.parts`) on sm90
_ARITHMETIC = "not compiled yet: by arithmetic and by its neighbours"


def _same(rows: int, keys: int, warps: int, evidence: str) -> Row:
    config = Config(rows, keys, warps, 1)
    return Row(config, config, evidence)


TABLES: dict[str, Table] = {
    # 64 KiB of shared memory, and no tensor cores taken for granted: where there are none, a larger tile spills.
    "any": _table({
        ("forward", (16, 32, 64), (2, 4)): _same(32, 32, 4, "compiled, sm75 20 KiB, sm90 dressed 24 KiB"),
        ("forward", (128,), (2, 4)): _same(32, 32, 4, "compiled, sm90 fp32"),
        ("forward", (256,), (2, 4)): _same(16, 16, 4, "compiled, sm90 fp32"),
        ("forward", (512,), (2, 4)): _same(16, 16, 4, "compiled, sm90 fp32, 96 KiB"),
        ("dkdv", (16, 32, 64), (2, 4)): _same(32, 32, 4, "compiled, sm90 and gfx942, 20 KiB"),
        ("dkdv", (128,), (2,)): _same(32, 32, 8, "compiled, sm75 48 KiB, gfx942 8 KiB"),
        ("dkdv", (128,), (4,)): _same(16, 16, 8, "compiled, sm90, 40 KiB"),
        ("dkdv", (256,), (2, 4)): _same(16, 16, 8, "compiled, sm86 80 KiB in fp32"),
        ("dkdv", (512,), (2, 4)): _same(16, 16, 8, "compiled, gfx942 16 KiB, fp32 160 KiB"),
        ("dq", (16, 32, 64), (2, 4)): _same(32, 32, 4, "compiled, sm90 25 KiB, gfx942 4 KiB"),
        ("dq", (128,), (2,)): _same(32, 32, 8, _ARITHMETIC),
        ("dq", (128,), (4,)): _same(16, 16, 8, "compiled, sm90 plain 40 KiB"),
        ("dq", (256,), (2, 4)): _same(16, 16, 8, "compiled, sm90 fp32"),
        ("dq", (512,), (2, 4)): _same(16, 16, 8, "compiled, fp32 160 KiB"),
        ("dbias", (16, 32, 64), (2, 4)): _same(32, 32, 4, "compiled, sm90 12 KiB"),
        ("dbias", (128,), (2,)): _same(32, 32, 4, _ARITHMETIC),
        ("dbias", (128,), (4,)): _same(16, 16, 4, _ARITHMETIC),
        ("dbias", (256, 512), (2, 4)): _same(16, 16, 4, _ARITHMETIC),
    }),
    # AMD: 64 KiB, 512 vector registers a thread, no descriptors.
    "hip": _table({
        ("forward", (16, 32, 64, 128), (2,)): Row(
            Config(64, 32, 4, 1), Config(32, 32, 4, 1), "compiled for gfx942, 16 KiB"
        ),
        ("dkdv", (16, 32, 64), (2,)): Row(
            Config(32, 64, 4, 1), Config(32, 32, 4, 1), "compiled for gfx942, 8 KiB"
        ),
        ("dq", (16, 32, 64, 128), (2,)): Row(
            Config(64, 32, 4, 1), Config(32, 32, 4, 1), "compiled for gfx942, 16 KiB"
        ),
    }),
    # Ampere's tensor cores, 99 KiB: sm86, sm89, sm120, and sm80 where nothing larger serves.
    "sm86": _table({
        ("forward", (16, 32, 64), (2,)): Row(
            Config(128, 64, 4, 3), Config(32, 32, 4, 2), "compiled, sm80 48 KiB, sm100 65 KiB"
        ),
        ("forward", (128,), (2,)): Row(
            Config(64, 64, 4, 2), Config(32, 32, 4, 2), "compiled"
        ),
        ("forward", (256,), (2,)): Row(Config(32, 32, 4, 2), Config(32, 16, 4, 1), "compiled"),
        ("dkdv", (16, 32, 64), (2,)): Row(
            Config(32, 64, 4, 2), Config(32, 32, 4, 1), "compiled, sm80 24 KiB, sm100 41 KiB"
        ),
        ("dkdv", (128,), (2,)): Row(Config(32, 64, 8, 2), Config(32, 32, 8, 1), "compiled, sm80 52 KiB"),
        ("dq", (16, 32, 64), (2,)): Row(Config(64, 64, 4, 2), Config(32, 32, 4, 2), "compiled, sm80 32 KiB"),
        ("dq", (128,), (2,)): Row(Config(64, 32, 8, 2), Config(32, 32, 8, 2), _ARITHMETIC),
    }),
    # 163 KiB.
    "sm80": _table({
        ("forward", (128,), (2,)): Row(
            Config(128, 64, 8, 3), Config(32, 32, 4, 2), "compiled, 96 KiB"
        ),
        ("forward", (256,), (2,)): Row(Config(64, 32, 8, 2), Config(32, 16, 4, 1), "compiled"),
    }),
    # 227 KiB, wgmma (64 rows, or keys in dkdv, at least) and descriptors. KiB: the plain Config's of the widest head.
    "sm90": _table({
        ("forward", (16, 32, 64), (2,)): Row(
            Config(64, 128, 4, 2, True), Config(64, 64, 8, 2, True), _ALONE,
            window=Config(64, 64, 4, 2, True), bias=Config(64, 64, 4, 3),
        ),
        # 64 rows of 128 columns and seven options at once do not fit the registers; 32 rows would do without wgmma.
        ("forward", (128,), (2,)): Row(Config(64, 64, 4, 3, True), Config(64, 32, 4, 2, True), _ALONE),
        ("forward", (256,), (2,)): Row(Config(128, 64, 8, 2, True), Config(32, 32, 8, 1), _MEASURED),
        ("forward", (512,), (2,)): Row(
            Config(64, 32, 8, 2, True), Config(32, 16, 8, 1), f"compiled, 192 KiB; {_GUESSED}"
        ),
        ("forward", (16, 32, 64), (4,)): Row(Config(64, 64, 4, 2, True), Config(32, 32, 4, 1), _ALONE),
        ("dkdv", (16, 32, 64), (2,)): Row(
            Config(128, 64, 4, 2, True), Config(32, 64, 8, 1, True), _ALONE, bias=Config(64, 64, 4, 3),
        ),
        # 32 rows would spill a quarter of it, outside the loop, and take 1.17 times as long.
        ("dkdv", (16, 32, 64), (4,)): Row(Config(64, 64, 4, 1), Config(32, 32, 4, 1), _ALONE),
        # dK, dV, S and dP of 64 keys: bytes spill, and 8 warps that spill fewer are slower.
        ("dkdv", (128,), (2,)): Row(
            Config(64, 64, 4, 2, True), Config(32, 64, 8, 1, True), _ALONE
        ),
        ("dkdv", (256,), (2,)): Row(Config(64, 64, 8, 2, True), Config(16, 32, 8, 1), _MEASURED),
        ("dkdv", (512,), (2,)): Row(
            Config(32, 32, 8, 1, True), Config(16, 16, 8, 1), f"compiled, 98 KiB; {_GUESSED}"
        ),
        ("dq", (16, 32, 64), (2,)): Row(
            Config(64, 64, 4, 2, True), Config(64, 64, 8, 2, True), _ALONE,
            full=Config(64, 64, 4, 3, True), long=Config(64, 64, 4, 3, True), window=Config(64, 64, 4, 2, True),
            bias=Config(64, 64, 4, 3),
        ),
        ("dq", (16, 32, 64), (4,)): Row(Config(128, 64, 8, 2, True), Config(32, 32, 4, 1), _ALONE),
        ("dq", (128,), (2,)): Row(
            Config(64, 64, 4, 2, True), Config(32, 32, 4, 2, True), _ALONE,
            full=Config(128, 32, 8, 3, True), long=Config(128, 64, 8, 3, True), window=Config(64, 64, 4, 2, True),
            packed=Config(64, 32, 4, 4, True),
        ),
        # 128 x 32 in 8 warps is 2 % faster, and fills the shared memory to the last KiB.
        ("dq", (256,), (2,)): Row(Config(64, 32, 4, 3, True), Config(32, 32, 8, 1), _MEASURED),
        ("dq", (512,), (2,)): Row(
            Config(32, 16, 8, 2, True), Config(16, 16, 8, 1), f"compiled, 97 KiB; {_GUESSED}"
        ),
        ("dbias", (16, 32, 64), (4,)): Row(
            Config(16, 32, 8, 1), Config(16, 32, 8, 1), f"compiled, 20 KiB; {_GUESSED}"
        ),
    }),
    # In Triton's interpreter, which alone runs on CPU tensors.
    "cpu": _table({
        ("dkdv", WIDTHS, (2, 4)): Row(Config(16, 32, 4, 1), Config(16, 32, 4, 1), _INTERPRETED),
        **{
            (name, WIDTHS, (2, 4)): Row(Config(32, 16, 4, 1), Config(32, 16, 4, 1), _INTERPRETED)
            for name in ("forward", "dq", "dbias")
        },
    }),
}  # fmt: skip

# The tables of each `Problem.device`, the nearest first. An architecture that is not here has "any" alone.
ORDER: dict[str, tuple[str, ...]] = {
    "cpu": ("cpu",),
    "sm75": ("any",),
    "sm80": ("sm80", "sm86", "any"),
    "sm86": ("sm86", "any"),
    "sm87": ("sm86", "any"),
    "sm89": ("sm86", "any"),
    "sm90": ("sm90", "any"),
    "sm100": ("sm86", "any"),
    "sm103": ("sm86", "any"),
    "sm120": ("sm86", "any"),
    "sm121": ("sm86", "any"),
    "cuda": ("hip", "any"),  # PyTorch's name for an AMD GPU, whose problem has no "smXX"
    "hip": ("hip", "any"),
}
UNKNOWN = "unknown"
SHARED_KIB = {"sm75": 64, "sm80": 163, "sm86": 99, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99, "cuda": 64}

# (arch, kernel, padded head size, bytes of an element) whose smallest tiles need more shared memory than there is.
UNFIT = {
    *(("sm75", name, 512, 4) for name in ("forward", "dkdv", "dq", "dbias")),
    *((arch, name, 512, 4) for arch in ("sm86", "sm87", "sm89", "sm120", "sm121") for name in ("dkdv", "dq", "dbias")),
}


def row(arch: str, direction: str, width: int, itemsize: int) -> Row:
    """The row for a padded head size and bytes of an element: the first that the architecture's tables have."""
    key = (direction, width, itemsize)
    return next(TABLES[name][key] for name in ORDER.get(arch, ("any",)) if key in TABLES[name])


# (arch, direction, padded head size, bytes of an element, kind) -> Config: what the tables say, all looked up.
_CHOICES = {
    (arch, direction, width, itemsize, kind): row(arch, direction, width, itemsize).config(kind)
    for arch in (*ORDER, UNKNOWN)
    for direction in DIRECTIONS
    for width in WIDTHS
    for itemsize in (2, 4)
    for kind in KINDS
}


def choose(problem: Problem, direction: str) -> Config:
    """The configuration of a kernel: "forward", "dkdv", "dq" or "dbias"."""
    arch = problem.device if problem.device in ORDER else UNKNOWN
    wide = max(problem.qk_dim, problem.v_dim)
    width = 1 << (wide - 1).bit_length() if wide > 16 else 16
    return _CHOICES[arch, direction, width, problem.dtype.itemsize, kind_of(problem)]


def kind_of(problem: Problem) -> str:
    """Which of KINDS serves the problem."""
    on_pairs = problem.mask == "bool" or problem.alibi or problem.softcap or problem.dropout_p
    if on_pairs or problem.bias is not None:
        return "dressed" if on_pairs or problem.mask == "blocks" else "bias"
    if problem.mask == "blocks":
        return "blocks"
    if problem.q_layout is not Layout.PACKED and problem.k_len < LONG:
        return "full" if problem.band.is_full else "plain"
    if problem.band.left is not None and problem.band.right is not None:
        return "window"
    if problem.band.is_full:
        return "long full"
    return "packed" if problem.q_layout is Layout.PACKED else "long"


def why_not(problem: Problem) -> str | None:
    """Why no configuration fits the device's shared memory; None: one does."""
    wide = max(problem.qk_dim, problem.v_dim)
    width = 1 << (wide - 1).bit_length()
    directions = DIRECTIONS if problem.needs_grad else ("forward",)
    if any((problem.device, name, width, problem.dtype.itemsize) in UNFIT for name in directions):
        return f"fp32 head sizes over 256 do not fit the shared memory of {problem.device}"
    return None


def is_dressed(problem: Problem) -> bool:
    """Whether an option works on each pair's score, which costs registers."""
    return kind_of(problem) in ("dressed", "bias")


def shared_bound(config: Config, direction: str, width: int, itemsize: int, dressed: bool) -> int:
    """Bytes of shared memory that a block takes at most.

    The tiles that stay (Q; K and V for dkdv; Q and dO for dq), `stages` buffers of the two that pass by, P or dS on its
    way from one product to the next, 1 KiB a warp for exchanges, barriers and alignment; dressed, an fp32 bias in as many
    buffers and once more in another layout. Split fp32 tiles take half as much again, and the last stage's are only
    those. Tiles that are loaded by one stage and no descriptor often share their
    place; the 16 x 16 rows of the largest heads rely on it. Dressed, 512 columns take twice as much for exchanges (sm90).
    """
    side, other = (config.keys, config.rows) if direction == "dkdv" else (config.rows, config.keys)
    line = width * itemsize
    more = line // 2 if itemsize == 4 and width <= SPLIT else 0
    stays = (1 if direction == "forward" else 2) * side * (line + more)
    passes = 2 * other * line + 8 * other  # and their lse and delta
    pairs = config.rows * config.keys
    scratch = (
        pairs * max(itemsize, 4 if dressed else 0)
        + (4 * pairs * config.stages if dressed else 0)
        + 1024 * config.warps * (2 if dressed and width == 512 else 1)
    )
    turned = side * line if itemsize == 4 and width > SPLIT and direction != "forward" else 0  # for a TF32 product
    return stays + config.stages * passes + 2 * other * more + turned + scratch
