"""tests/gpu/stress.py, as far as it goes without a GPU: what counts as different, and what it says then."""

from __future__ import annotations

import pytest
import torch
from gpu import stress
from gpu.stress import CALLS, Call, freedom, unlike

import tilewise
from tilewise import Band, causal

BF16 = torch.bfloat16


def test_a_bit_is_a_difference() -> None:
    for dtype in (BF16, torch.float32):
        first = torch.randn(4, 70).to(dtype)
        got = first.clone()
        assert unlike(got, first).item() == 0
        got[1, 3] = torch.nextafter(got[1, 3], torch.tensor(9.0, dtype=dtype))
        got[2, 5] = torch.nan
        assert unlike(got, first).item() == 2
        assert unlike(got, got).item() == 0  # NaN with the same bits is the same
    assert unlike(torch.tensor([0.0]), torch.tensor([-0.0])).item() == 1


@pytest.mark.parametrize("band", [Band(), causal])
def test_the_order_of_a_sum_is_let_go_and_a_tile_is_not(band: Band) -> None:
    """dQ summed in fp32 over its tiles of keys, in other orders; and with one tile missing, doubled or another's."""
    make = torch.Generator().manual_seed(0)
    q, do = torch.randn(2, 1, 4, 512, 64, generator=make).to(BF16)
    k, v = torch.randn(2, 1, 2, 512, 64, generator=make).to(BF16)
    q.requires_grad_()
    o = tilewise.attention(q, k, v, mask=band)
    exact = torch.autograd.grad(o, q, do)[0]
    q = q.detach()
    K, V = (x.float().repeat_interleave(2, 1) for x in (k, v))
    P = (q.float() @ K.mT / 8).masked_fill(~band.dense(512, 512), -torch.inf).softmax(-1)
    dP = do.float() @ V.mT
    dS = (P * (dP - (P * dP).sum(-1, keepdim=True))) / 8
    tiles = [dS[..., at : at + 64] @ K[..., at : at + 64, :] for at in range(0, 512, 64)]

    def total(order: list[int]) -> torch.Tensor:
        dq = torch.zeros_like(tiles[0])
        for n in order:
            dq += tiles[n]
        return dq.to(BF16)

    first = total(list(range(8)))
    torch.testing.assert_close(first, exact, rtol=2e-2, atol=2e-2)
    allowed = freedom(q, k, v, do, first, band)
    shuffled = [torch.randperm(8, generator=make).tolist() for _ in range(30)]
    assert any(unlike(total(order), first).item() for order in shuffled), "no order changes a bit: nothing was tried"
    for order in shuffled:
        assert unlike(total(order), first, allowed).item() == 0
    for order in ([0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 2, 3, 4, 5, 6, 7], [1, 1, 2, 3, 4, 5, 6, 7]):
        assert unlike(total(order), first, allowed).item() > 1000
    spoilt = first.clone()
    spoilt[0, 0, 3, 3] = torch.nan
    assert unlike(spoilt, first, allowed).item() == 1


@pytest.mark.parametrize("direction", stress.RESULTS)
def test_a_planted_difference_is_counted(
    direction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stress, "DEVICE", "cpu")
    monkeypatch.setattr(stress, "backend_of", lambda name: "tiled")
    one = stress.Repeated(Call(direction, 16, 100, causal, batch=1, heads=2, kv_heads=1))
    one.repeat(2)
    assert str(one).endswith(": 2 calls, 0 differ")
    run, spoil = one.run, iter([None, 0, 1, None])

    def spoilt() -> tuple[torch.Tensor, ...]:
        got, at = run(), next(spoil)
        return tuple(x.roll(1, -1) if n == at else x for n, x in enumerate(got))

    one.run = spoilt
    one.repeat(4)
    first, second = stress.RESULTS[direction][:2]
    assert str(one).endswith(f": 6 calls, 2 differ ({first} 1, {second} 1)")
    assert f"{one.call.name}, call 4: elements that differ: {{'{first}': " in capsys.readouterr().out


def test_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    args = stress.arguments(["--seconds", "9", "--others", "0", "--only", "deterministic d64,forward d256"])
    assert (args.seconds, args.others) == (9.0, 0)
    assert {(call.direction, call.d) for call in args.calls} == {("deterministic", 64), ("forward", 256)}
    assert stress.arguments([]).calls == CALLS
    assert len({call.name for call in CALLS}) == len(CALLS)
    for wrong in (["--only", "sideways"], ["--others", "-1"]):
        with pytest.raises(SystemExit):
            stress.arguments(wrong)
    assert "chooses none of" in capsys.readouterr().err
