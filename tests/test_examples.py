"""examples/: training resumes where it was, and several ranks train as one process does."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "train_gpt2.py"
SMALL = ["--context", "32", "--batch", "2", "--warmup", "2", "--dropout", "0.1"]


@pytest.mark.filterwarnings("ignore")  # of torch.distributed.checkpoint
def test_training_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 8)
    common = [*SMALL, "--text", str(text), "--steps", "6", "--save-every", "4"]
    whole = main([*common, "--out", str(tmp_path / "a")])
    assert whole[-1] < whole[0] - 0.2
    assert "[##############################] 6/6" in capsys.readouterr().err
    (tmp_path / "a" / "latest").write_text("4")
    assert main([*common, "--out", str(tmp_path / "a"), "--resume"]) == whole[4:]
    with pytest.raises(SystemExit, match="there is no checkpoint in"):
        main([*common, "--out", str(tmp_path / "b"), "--resume"])


@pytest.mark.slow
def test_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """Under torchrun; and what two ranks have saved, four go on with."""

    def losses(ranks: int, *args: str) -> list[float]:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [
            *(launcher if ranks > 1 else [sys.executable]),
            str(SCRIPT),
            "--context",
            "64",
            "--warmup",
            "2",
            *args,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return [float(x) for x in re.findall(r"loss ([0-9.]+)", done.stderr)]

    two, alone = str(tmp_path / "two"), str(tmp_path / "alone")
    expected = losses(1, "--steps", "8", "--out", alone)
    assert losses(2, "--steps", "8", "--out", two, "--ring", "2", "--save-every", "4") == pytest.approx(
        expected, abs=2e-4
    )
    (tmp_path / "two" / "latest").write_text("4")
    resumed = losses(4, "--steps", "8", "--out", two, "--ring", "2", "--ulysses", "2", "--resume")
    assert resumed == pytest.approx(expected[4:], abs=2e-4)
