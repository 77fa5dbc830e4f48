"""Tests that need TRITON_INTERPRET=1 before Triton is imported: `test_triton.py` runs them in processes of their own.

By hand, from the root: TRITON_INTERPRET=1 python -m pytest tests/interpreted -k "softcap"
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from faster import leave_out_what_no_one_reads, look_up_dtypes_once, patch_once_a_kernel
    from new_numpy import make_indices_of_one_element
    from right_numbers import convert_bf16, multiply_bf16, prefer_numbers_to_nan

    make_indices_of_one_element()
    patch_once_a_kernel()
    leave_out_what_no_one_reads()
    look_up_dtypes_once()
    convert_bf16()
    multiply_bf16()
    prefer_numbers_to_nan()
else:
    collect_ignore_glob = ["*"]


@pytest.fixture
def backend() -> str:
    return "triton"
