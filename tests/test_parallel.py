"""Attention over several ranks is that of one device: values, gradients, dropout's bits; and faults end in errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from close import assert_close, evaluate
from ranks import Ranks
from torch import Tensor, nn

import tilewise
from tilewise.parallel import ContextParallel, exchange, ring

# --- one call, whole, and over ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call in small. over: "ring 4", "ring 2", "ulysses 4", "ulysses 2" or "ring 2 x ulysses 2"."""

    over: str
    layout: str = "zigzag"
    head_groups: int | None = None
    batch: int = 1
    length: int = 256
    heads: int = 4
    kv_heads: int = 4
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    mask: tilewise.Band | None = tilewise.causal
    blocks: bool = False
    slopes: str = ""  # "h", "bh"
    sink: bool = False
    lens: tuple[int, ...] | None = None
    cu: tuple[int, ...] | None = None
    through_lse: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """(q, k, v, do, dlse) and the options of `tilewise.attention` or `attention_packed`, on the group's device."""
        draw = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw).to(device(), self.dtype)

        d, v_dim = self.dims
        shapes = [(self.heads, d), (self.kv_heads, d), (self.kv_heads, v_dim), (self.heads, v_dim)]
        if self.cu is None:
            q, k, v, do = (normal(self.batch, h, self.length, n) for h, n in shapes)
        else:
            q, k, v, do = (normal(self.length, h, n) for h, n in shapes)
        dlse = normal(*(q.shape[:3] if self.cu is None else (self.heads, self.length))).float()
        options: dict[str, Any] = dict(self.options)
        n = self.batch if self.cu is None else len(self.cu) - 1
        if self.mask is not None:
            options["mask"] = self.mask
        if self.blocks:
            options["mask"] = self.block_mask() if self.mask is None else self.mask & self.block_mask()
        if self.slopes:
            shape = (self.heads,) if self.slopes == "h" else (n, self.heads)
            options["alibi_slopes"] = torch.rand(shape, generator=draw).to(device()) / 32
        if self.sink:
            options["sink"] = torch.randn(self.heads, generator=draw).to(device())
        if self.lens is not None:
            lens = torch.tensor(self.lens, dtype=torch.int32, device=device())
            options |= {"q_lens": lens, "k_lens": lens}
        if self.cu is not None:
            cu = torch.tensor(self.cu, dtype=torch.int32, device=device())
            options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
        return (q, k, v, do, dlse if self.through_lse else None), options  # type: ignore[return-value]

    def block_mask(self) -> tilewise.BlockMask:
        return tilewise.BlockMask.from_predicate(
            lambda b, h, i, j: ((i - j) % (100 + 60 * h) < 50) | (i // 128 == j // 128),
            self.length, self.length, heads=self.heads, device=device(),
        )  # fmt: skip


def device() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def parallel(case: Case) -> ContextParallel:
    """A new object each time; the groups are made once."""
    if case.over not in _groups:
        name, size, *others = case.over.split()
        if int(size) == dist.get_world_size() and not others:
            _groups[case.over] = {name: dist.group.WORLD}
        else:
            mesh = dist.device_mesh.init_device_mesh(device(), (2, 2), mesh_dim_names=("ring", "ulysses"))
            both = {"ring": mesh["ring"], "ulysses": mesh["ulysses"]}
            _groups.update({f"{name} 2": {name: group} for name, group in both.items()})
            _groups["ring 2 x ulysses 2"] = both
    return ContextParallel(**_groups[case.over], layout=case.layout, head_groups=case.head_groups)


_groups: dict[str, dict[str, Any]] = {}


class Gathered(torch.autograd.Function):
    """`unshard` with the gradient that each rank's shard of the whole has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: ContextParallel, dim: int) -> Tensor:
        ctx.over, ctx.dim = over, dim
        return over.unshard(x, dim)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        return ctx.over.shard(dx, ctx.dim), None, None


def over_ranks(over: ContextParallel, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """o and lse as one device gives them."""
    options["lens"] = options.pop("q_lens", None)
    options.pop("k_lens", None)
    cu = options.pop("cu_seqlens_q", None)
    options.pop("cu_seqlens_k", None)
    if cu is None:
        q, k, v = (over.shard(x, 2) for x in (q, k, v))
        o, lse = over.attention(q, k, v, **options, return_lse=True)
        return Gathered.apply(o, over, 2), Gathered.apply(lse, over, 2)
    options.pop("lens")
    q, k, v = (over.shard(x, 0) for x in (q, k, v))
    o, lse = over.attention_packed(q, k, v, cu, **options, return_lse=True)
    return Gathered.apply(o, over, 0), Gathered.apply(lse, over, 1)


def check(case: Case) -> None:
    """On all ranks: the results of the whole, each gradient the sum of the ranks' shares, within the error budget."""
    over = parallel(case)
    inputs, options = case.inputs()
    got = evaluate(lambda q, k, v, **o: over_ranks(over, q, k, v, **o), *inputs, **options)
    for name in got.keys() - {"o", "lse"}:
        for group in (over.ring, over.ulysses):
            if group is not None:
                share = got[name].float()
                dist.all_reduce(share, group=group)
                got[name] = share.to(got[name].dtype)
    if dist.get_rank() == 0:
        assert_close(got, *inputs, **options)
        assert case.length == 0 or got["dq"].any()


DROPOUT = {"dropout_p": 0.3, "seed": 5}
CASES = {
    "causal": Case("ring 4"),
    "causal, 2 ranks, heads in parts": Case("ring 2", head_groups=2, batch=2),
    "full": Case("ring 4", layout="contiguous", mask=None, dims=(24, 8)),
    "grouped, bf16, through lse": Case(
        "ring 4", dtype=torch.bfloat16, heads=6, kv_heads=3, head_groups=3, through_lse=True, batch=2),
    "fp16, two pieces": Case("ring 2", dtype=torch.float16, heads=2, kv_heads=1),
    "window": Case("ring 4", layout="contiguous", length=1024, mask=tilewise.sliding_window(100)),
    "window both ways, zig-zag": Case("ring 4", length=2048, heads=1, kv_heads=1, mask=tilewise.sliding_window(70, 30)),
    "rows without keys": Case("ring 4", mask=tilewise.Band(None, -60), through_lse=True),
    "dropout, softcap": Case("ring 4", options={"dropout_p": 0.3, "seed": 5, "softcap": 3.0}, batch=2),
    "dropout, window, 2 ranks": Case(
        "ring 2", length=1024, heads=2, kv_heads=1, mask=tilewise.sliding_window(150), options=DROPOUT),
    "slopes": Case("ring 4", slopes="bh", batch=2, through_lse=True),
    "sink": Case("ring 4", sink=True, heads=4, kv_heads=2, head_groups=2, through_lse=True),
    "sink, window": Case("ring 4", length=512, sink=True, mask=tilewise.sliding_window(9), options={"scale": -0.3}),
    "lengths": Case("ring 4", batch=3, lens=(256, 0, 101), slopes="h", mask=tilewise.Band(90, 60)),
    "blocks": Case("ring 2", length=512, blocks=True, heads=2, kv_heads=2, head_groups=2),
    "blocks, full, dropout": Case(
        "ring 2", length=512, mask=None, blocks=True, heads=2, kv_heads=2, options=DROPOUT),
    "packed": Case("ring 4", cu=(0, 40, 40, 170, 177, 256), heads=4, kv_heads=2),
    "packed, tokens of no sequence, full": Case("ring 4", cu=(0, 90, 230), mask=None, layout="contiguous"),
    "packed, dropout, slopes": Case(
        "ring 4", cu=(0, 3, 150, 150, 190, 256), slopes="bh", sink=True, head_groups=2, options=DROPOUT),
    "packed, window, 2 ranks": Case(
        "ring 2", length=1024, cu=(0, 700, 1000), mask=tilewise.sliding_window(130), heads=2, kv_heads=2,
        through_lse=True),
    "ulysses": Case("ulysses 4", through_lse=True),
    "ulysses, fewer heads than ranks": Case("ulysses 4", kv_heads=2, sink=True, slopes="bh", batch=2),
    "ulysses, dropout, blocks": Case("ulysses 2", blocks=True, batch=2, options=DROPOUT),
    "ulysses, packed, dropout": Case("ulysses 4", cu=(0, 40, 40, 170, 256), options=DROPOUT),
    "both": Case("ring 2 x ulysses 2", through_lse=True, kv_heads=2),
    "both, dropout, slopes": Case("ring 2 x ulysses 2", slopes="h", sink=True, options=DROPOUT),
    "both, packed": Case("ring 2 x ulysses 2", cu=(0, 40, 170, 250), options=DROPOUT),
    "no tokens": Case("ring 4", length=0),
}  # fmt: skip


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4, timeout=60)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", CASES)
def test_ranks_together_are_one_device(ranks: Ranks, name: str) -> None:
    ranks(check, CASES[name])


def seeds_drawn(over: str) -> None:
    """Without a seed the pairs that are dropped are those of the seed that the first rank has drawn."""
    torch.manual_seed(dist.get_rank())
    case = Case(over, options={"dropout_p": 0.5})
    (q, k, v, *_), options = case.inputs()
    after = [over_ranks(parallel(case), q, k, v, **options)[0] for _ in range(2)]
    assert not torch.equal(*after)
    torch.manual_seed(0)
    for o in after:
        seed = int(torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64))
        torch.testing.assert_close(o, tilewise.attention(q, k, v, **options, seed=seed))


@pytest.mark.parametrize("over", ["ring 4", "ring 2 x ulysses 2"])
def test_a_drawn_seed_is_the_first_ranks(ranks: Ranks, over: str) -> None:
    ranks(seeds_drawn, over)


# --- tokens --------------------------------------------------------------------------------------------------------


def whole_again(over: str, layout: str) -> list[int]:
    context = parallel(Case(over, layout))
    x = torch.arange(48.0).reshape(2, 24).requires_grad_()
    mine = context.shard(x, 1)
    assert torch.equal(context.unshard(mine, 1), x)
    mine.sum().backward()
    assert x.grad is not None
    positions = context.positions(24)
    assert torch.equal(x.grad.nonzero()[:, 1].unique(), positions.sort()[0])
    assert torch.equal(mine[0], positions.float())
    return positions.tolist()


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("over", ["ring 4", "ring 2", "ulysses 4", "ring 2 x ulysses 2"])
def test_each_token_is_somewhere(ranks: Ranks, over: str, layout: str) -> None:
    positions = ranks(whole_again, over, layout)
    if "4" in over or "x" in over:
        assert sorted(token for held in positions for token in held) == list(range(24))
    if over == "ring 4":
        assert positions[1] == ([3, 4, 5, 18, 19, 20] if layout == "zigzag" else list(range(6, 12)))


# --- what is sent ---------------------------------------------------------------------------------------------------


def sent(case: Case) -> tuple[int, int]:
    """Elements that this rank sends forward and backward."""
    counts: list[int] = []
    usual = exchange.dist.batch_isend_irecv

    def counting(ops: list[Any]) -> Any:
        counts.append(sum(op.tensor.numel() for op in ops if op.op is dist.isend))
        return usual(ops)

    exchange.dist.batch_isend_irecv = counting
    try:
        (q, k, v, do, _), options = case.inputs()
        over = parallel(case)
        mine = [over.shard(x, 2).requires_grad_() for x in (q, k, v)]
        o = over.attention(*mine, **options)
        forward = sum(counts)
        o.backward(over.shard(do, 2))
    finally:
        exchange.dist.batch_isend_irecv = usual
    return forward, sum(counts) - forward


def test_no_more_is_sent_than_is_seen(ranks: Ranks) -> None:
    """Causal, in zig-zag: a later rank needs the first half of one's keys, an earlier one all; gradients likewise."""
    case = Case("ring 4", length=512, kv_heads=2, dims=(16, 24))
    half = 64 * 2 * (16 + 24)
    for rank, (forward, backward) in enumerate(ranks(sent, case)):
        keys, gradients = 2 * rank + (3 - rank), rank + 2 * (3 - rank)  # in halves
        assert (forward, backward) == (keys * half, (keys + gradients) * half)
    window = Case("ring 4", layout="contiguous", length=4096, heads=1, kv_heads=1, mask=tilewise.sliding_window(100))
    assert [forward for forward, _ in ranks(sent, window)] == [128 * 32] * 3 + [0]


def order_of_events(case: Case) -> list[str]:
    """In what order this rank begins exchanges ("<" of keys and gradients alike), waits (">") and computes ("step")."""
    events: list[str] = []
    wrapped = [(exchange.Exchange, "__init__", "<"), (exchange.Exchange, "wait", ">")]
    wrapped += [(ring.Part, "forward", "step"), (ring.Part, "backward", "step")]
    usual = [getattr(owner, name) for owner, name, _ in wrapped]

    def noted(does: Callable[..., Any], event: str) -> Callable[..., Any]:
        def noting(*args: Any) -> Any:
            events.append(event)
            return does(*args)

        return noting

    try:
        for (owner, name, event), does in zip(wrapped, usual, strict=True):
            setattr(owner, name, noted(does, event))
        (q, k, v, do, _), options = case.inputs()
        over = parallel(case)
        mine = [over.shard(x, 2).requires_grad_() for x in (q, k, v)]
        over.attention(*mine, **options).backward(over.shard(do, 2))
    finally:
        for (owner, name, _), does in zip(wrapped, usual, strict=True):
            setattr(owner, name, does)
    return events


def test_exchanges_begin_before_the_steps_that_hide_them(ranks: Ranks) -> None:
    """Two ranks, heads in two parts: own keys, the other's, own, the other's; and back own, other's, other's, own."""
    for events in ranks(order_of_events, Case("ring 2", head_groups=2)):
        assert " ".join(events) == "< step < > step step > step" + " < < step > step < > step < > step >"


# --- training ------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """A layer of causal attention. over: the ranks that share a sequence, or None."""

    def __init__(self, over: ContextParallel | None):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(32, 32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.attend = tilewise.attention if over is None else over.attention

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.out(x + self.attend(q, k, v, mask=tilewise.causal).transpose(1, 2).flatten(2))


def train(over: ContextParallel | None, prepare: Callable[[Tiny], None]) -> list[float]:
    """Losses of a few steps, by one process or by ranks that share each sequence."""
    torch.manual_seed(0)
    model = Tiny(over)
    prepare(model)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(32, (2, 129), generator=torch.Generator().manual_seed(1))
    x, target = tokens[:, :-1], tokens[:, 1:]
    if over is not None:
        x, target = over.shard(x, 1), over.shard(target, 1)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), target.flatten())
        loss.backward()
        adam.step()
        adam.zero_grad()
        mean = loss.detach().clone()
        if over is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
    return losses


def train_sharded(over: str) -> list[float]:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (4,))
    return train(parallel(Case(over)), lambda model: fully_shard(model, mesh=mesh))


@pytest.mark.parametrize("over", ["ring 4", "ring 2 x ulysses 2"])
def test_fsdp2_trains_as_one_process_does(ranks: Ranks, over: str) -> None:
    alone = train(None, lambda model: None)
    assert alone[-1] < alone[0] - 0.2
    for losses in ranks(train_sharded, over):
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-4)


# --- what is refused, and what goes wrong --------------------------------------------------------------------------


def call(over: str = "ring 4", **changes: Any) -> Any:
    """One small call; `changes` are of (name, value) for a rank: the argument that it has instead."""
    arguments: dict[str, Any] = {"length": 32, "heads": 4, "kv_heads": 4, "mask": tilewise.causal}
    arguments |= {name: value for name, value in changes.items() if not name.startswith("rank")}
    arguments |= changes.get(f"rank{dist.get_rank()}", {})
    length, heads, kv_heads = (arguments.pop(name) for name in ("length", "heads", "kv_heads"))
    if cu := arguments.pop("cu", None):
        q, k = torch.randn(length, heads, 8), torch.randn(length, kv_heads, 8)
        return parallel(Case(over)).attention_packed(q, k, k, torch.tensor(cu, dtype=torch.int32), **arguments)
    q, k = torch.randn(1, heads, length, 8, requires_grad=True), torch.randn(1, kv_heads, length, 8)
    return parallel(Case(over)).attention(q, k, k, **arguments)


def attempt(changes: dict[str, Any]) -> None:
    call(**changes)


REFUSED = {
    "lengths differ": ({"rank1": {"length": 16}}, "q differs: rank 1 has (1, 4, 16, 8), rank 0 has (1, 4, 32, 8)"),
    "heads differ": ({"rank3": {"kv_heads": 2}}, "k differs: rank 3 has (1, 2, 32, 8), rank 0 has (1, 4, 32, 8)"),
    "masks differ": ({"rank2": {"mask": None}}, "mask differs: rank 2 has Band(left=None, right=None"),
    "options differ": ({"rank0": {"softcap": 2.0}}, "options differs: rank 0 has scale="),
    "seeds differ": ({"dropout_p": 0.1, "seed": 1, "rank2": {"seed": 3}}, "seed differs: rank 2 has 3, rank 0 has 1"),
    "sequences differ": ({"cu": (0, 128), "rank1": {"cu": (0, 5, 128)}}, "sequences differs: rank 1 has 2"),
    "ends differ": ({"cu": (0, 6, 128), "rank1": {"cu": (0, 5, 128)}}, "cu_seqlens differs: rank 1 has"),
    "one rank's argument is bad": ({"rank2": {"scale": float("nan")}}, "scale is nan: it must be finite"),
    "in the two groups": ({"over": "ring 2 x ulysses 2", "rank3": {"length": 64}}, "q differs"),
    "one is bad, in the two groups": ({"over": "ring 2 x ulysses 2", "rank3": {"scale": "1"}}, "scale is '1'"),
    "bad mask": ({"mask": torch.ones(32, 32, dtype=torch.bool)}, "mask is Tensor: context parallel takes a Band, a Bl"),
    "tokens": (
        {"length": 31},
        "the sequence has 124 tokens: over 4 ranks in layout 'zigzag' it must be a multiple of 8",
    ),
    "too few heads": ({"over": "ulysses 4", "heads": 6, "kv_heads": 6}, "q has 6 heads, k has 6: over 4 ranks"),
    "ends at": ({"cu": (0, 129)}, "cu_seqlens ends at 129: all ranks together have only 128 tokens"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_calls_are_refused_everywhere(ranks: Ranks, name: str) -> None:
    changes, sentence = REFUSED[name]
    for answer in ranks.results(attempt, changes):
        assert isinstance(answer, ValueError | TypeError), answer
        assert sentence in str(answer)
    ranks(attempt, {})  # and the group works on


def other_ways() -> None:
    over = parallel(Case("ring 4"))
    q = torch.randn(1, 2, 8, 8, requires_grad=True)
    o = over.attention(q, q, q)
    with pytest.raises(NotImplementedError, match="no double backward"):
        torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no vmap"):
        torch.func.vmap(lambda x: over.attention(x, x, x))(torch.randn(2, 1, 2, 8, 8))


def recomputed(over: str) -> None:
    """Under activation checkpointing a drawn seed is drawn again; under autocast q, k and v are cast."""
    context, x = parallel(Case(over)), torch.randn(1, 4, 8, 8, requires_grad=True)
    attend = lambda x: context.attention(x, x, x, mask=tilewise.causal, dropout_p=0.4)  # noqa: E731
    gradients = []
    for run in (attend, lambda x: torch.utils.checkpoint.checkpoint(attend, x, use_reentrant=False)):
        torch.manual_seed(dist.get_rank())
        gradients += torch.autograd.grad(run(x).square().sum(), x)
    assert torch.equal(*gradients)
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(x).dtype is torch.bfloat16


@pytest.mark.parametrize("over", ["ring 4", "ulysses 4"])
def test_checkpointing_and_autocast(ranks: Ranks, over: str) -> None:
    ranks(recomputed, over)


def test_what_has_no_derivative_says_so(ranks: Ranks) -> None:
    ranks(other_ways)


def compiled() -> None:
    over = parallel(Case("ring 4"))
    x = torch.randn(1, 2, 8, 8)
    f = torch.compile(lambda x: 2 * over.attention(2 * x, x, x), backend="eager")
    torch.testing.assert_close(f(x), 2 * over.attention(2 * x, x, x))


@pytest.mark.slow
def test_compiled_code_leaves_it_out(ranks: Ranks) -> None:
    ranks(compiled)


def test_bad_objects() -> None:
    for arguments, sentence in (
        ({}, "one of them must be given"), ({"ring": 3}, "ring is int"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=sentence):
            ContextParallel(**arguments)  # type: ignore[arg-type]


def ready() -> None:
    """All have imported what they need: time-outs count from here."""


def die_at(stage: str, timeout: float) -> None:
    """Rank 1 is gone at this stage."""
    over = ContextParallel(ring=dist.new_group(timeout=timedelta(seconds=timeout)))
    x = torch.randn(1, 2, 64, 8, requires_grad=True)
    over.attention(x, x, x).sum().backward()
    if dist.get_rank() == 1:
        if stage == "before":
            os._exit(1)
        if stage == "stays away from the backward":
            over.attention(x, x, x)
            return
        usual, calls = exchange.Exchange.__init__, []

        def dying(*args: Any) -> None:
            calls.append(1)
            if len(calls) > {"in the forward": 1, "in the backward": 3}[stage]:
                os._exit(1)
            usual(*args)

        exchange.Exchange.__init__ = dying  # type: ignore[method-assign]
    over.attention(x, x, x).sum().backward()


@pytest.mark.parametrize("stage", ["before", "in the forward", "in the backward", "stays away from the backward"])
def test_a_rank_that_is_gone_is_named_in_time(stage: str) -> None:
    timeout = 4.0
    pool = Ranks(3, timeout=60)
    try:
        pool(ready)
        began = time.monotonic()
        answers = pool.results(die_at, stage, timeout)
        assert time.monotonic() - began < 2 * timeout + 20
        for rank in (0, 2):
            assert isinstance(answers[rank], RuntimeError), answers
            assert "context parallel: " in str(answers[rank])
            assert "rank 1" in str(answers[rank])
    finally:
        pool.close()
