"""Tests that need TRITON_INTERPRET=1 before Triton is imported: `test_triton.py` runs them in processes of their own.

By hand, from the root: TRITON_INTERPRET=1 python -m pytest tests/interpreted -k "softcap"
"""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from faster import patch_once_a_kernel

    patch_once_a_kernel()
else:
    collect_ignore_glob = ["*"]


@pytest.fixture
def backend() -> str:
    return "triton"
