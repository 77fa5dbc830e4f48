"""Named, sampled and covering cases at real sizes against the fp64 reference, which runs on the GPU, too."""

from __future__ import annotations

import pool
import pytest
import torch
from cases import LAYOUTS, Case, laid_out
from hopper_cases import on_hopper
from triton_cases import on_gpu
from where import BACKEND, DEVICE, EVERY, WHY_NOT_HOPPER, moved


@pytest.mark.parametrize("case_name", list(on_gpu())[::EVERY])
def test_case(case_name: str, verdicts: dict[str, pool.Verdict]) -> None:
    assert not verdicts[case_name].fault, verdicts[case_name].fault


@pytest.mark.skipif(WHY_NOT_HOPPER is not None, reason=str(WHY_NOT_HOPPER))
@pytest.mark.parametrize("case_name", list(on_hopper())[::EVERY])
def test_case_on_hopper(case_name: str, verdicts: dict[str, pool.Verdict]) -> None:
    assert not verdicts[case_name].fault, verdicts[case_name].fault


@pytest.mark.parametrize("layout", [*LAYOUTS, "scalar", "contiguous"])
def test_moving_to_the_device_keeps_strides(layout: str) -> None:
    x = laid_out(torch.randn(2, 3, 5, 4), layout)
    there = moved(x)
    assert (there.device.type, there.stride(), there.storage_offset()) == (DEVICE, x.stride(), x.storage_offset())
    assert torch.equal(there.cpu(), x)


def test_the_pool_sees_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a backend raises, and what it does not give, is the verdict of that case alone."""
    assert pool._fault(Case(dim=8, v_dim=8), twice=False, backend=BACKEND) == ""
    assert "kv_heads=3" in pool._fault(Case(heads=2, kv_heads=3), twice=False, backend=BACKEND)
    attend = Case.attend

    def wrong(self: Case, backend: str | None):
        return lambda *args, **options: tuple(x * 1.1 for x in attend(self, backend)(*args, **options))

    monkeypatch.setattr(Case, "attend", wrong)
    assert "o: error / budget" in pool._fault(Case(dim=8, v_dim=8), twice=False, backend=BACKEND)
