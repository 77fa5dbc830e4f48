"""launch.py: what it keys a binary by, what it gives Triton's launchers, recording, and compiling with no device."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("in Triton's interpreter there are no binaries", allow_module_level=True)

import triton.language as tl  # noqa: E402
from triton.backends.amd.driver import HIPLauncher  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaLauncher  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from tilewise.kernels import launch as module  # noqa: E402
from tilewise.kernels.launch import Box, Launch, Ready, compile_for, launch, recording, resources  # noqa: E402

ROOT = Path(__file__).parents[1]


@triton.jit(do_not_specialize=["n"])
def add(x, y, out, n, scale, SIDE: tl.constexpr, SQUARE: tl.constexpr = False):
    """out[i] = scale * x[i] + y[i], y None for 0; x[i] squared with SQUARE."""
    i = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    value = tl.load(x + i, mask=i < n)
    if SQUARE:
        value = value * value
    value = value * scale
    if y is not None:
        value += tl.load(y + i, mask=i < n)
    tl.store(out + i, value, mask=i < n)


@triton.jit(do_not_specialize=["n"])
def products(x, out, n, ROWS: tl.constexpr, D: tl.constexpr, DESCRIPTOR: tl.constexpr):
    """out = the sum over n tiles t of x[0] x[t]^T: its accumulator needs registers, its tiles shared memory."""
    rows, columns, d = tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :], tl.arange(0, D)[None, :]
    first = tl.load(x + rows * D + d)
    sum = tl.zeros([ROWS, ROWS], tl.float32)
    if DESCRIPTOR:
        tiles = tl.make_tensor_descriptor(x, [n * ROWS, D], [D, 1], [ROWS, D])
        for t in range(n):
            sum = tl.dot(first, tl.trans(tiles.load([t * ROWS, 0])), sum)
    else:
        for t in range(n):
            sum = tl.exp(tl.dot(first, tl.trans(tl.load(x + (t * ROWS + rows) * D + d)), sum))
    tl.store(out + rows * ROWS + columns, sum)


@triton.jit
def specialised(x, n, SIDE: tl.constexpr):
    tl.store(x + n, SIDE)


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    index = 0

    def get_device(self) -> int:
        return self.index


def gpu(*shape: int, dtype: torch.dtype = torch.float32, index: int = 0) -> torch.Tensor:
    tensor = torch.zeros(*shape, dtype=dtype).as_subclass(OnGpu)
    tensor.index = index
    return tensor


def launcher(kind: type, given: list[tuple[Any, ...]], **attributes: object) -> Any:
    """Triton's own launcher class, with its C function replaced by one that notes what it is given."""
    made = kind.__new__(kind)
    defaults = {
        "launch": lambda *args: given.append(args), "num_ctas": 1, "global_scratch_size": 0, "global_scratch_align": 1,
        "profile_scratch_size": 0, "profile_scratch_align": 1, "launch_cooperative_grid": False, "launch_pdl": False,
        "gsan_enabled": False, "warp_size": 64, "arg_annotations": object(), "kernel_signature": b"signature",
    }  # fmt: skip
    for key, value in (defaults | attributes).items():
        setattr(made, key, value)
    return made


class Machine:
    """A GPU that is not there: what reaches Triton's kernel[grid], and what the C launcher of a binary."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.slow, self.given = 0, [], []
        self.compiled = SimpleNamespace(
            run=launcher(CudaLauncher, self.given), function=0xF00, packed_metadata=(4, 1, 128)
        )
        monkeypatch.setattr(add, "run", self.run)
        monkeypatch.setattr(module, "_binaries", {})
        monkeypatch.setattr(module, "_stream", lambda device: 0x5EA0 + device)
        monkeypatch.setattr(module, "_current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self.device)
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())

    def run(self, *args: object, grid: tuple[int, ...], warmup: bool, **keywords: object) -> Any:
        self.slow.append((self.current, args, grid, keywords))
        return self.compiled

    def device(self, index: int) -> Any:
        machine = self

        class Device:
            def __enter__(self) -> None:
                self.before, machine.current = machine.current, index

            def __exit__(self, *_: object) -> None:
                machine.current = self.before

        return Device()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def start(x: torch.Tensor, y: torch.Tensor | None = None, n: int = 5, grid: Any = (2, 3), **other: Any) -> None:
    constexprs = {"SIDE": 16, "SQUARE": True} | other
    launch(add, grid, (x, y, x, n, 0.5), constexprs, constexprs.pop("warps", 4), constexprs.pop("stages", 2))


# --- the launchers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "form"), [(CudaLauncher, (module._cuda_flat, module._cuda_packed)), (HIPLauncher, (module._hip,))]
)
def test_the_installed_triton_is_known(kind: type, form: tuple[Callable[..., Any], ...]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module._form(kind) in form


@pytest.mark.parametrize("kind", [CudaLauncher, HIPLauncher])
def test_the_second_launch_gives_the_c_function_what_tritons_own_would(machine: Machine, kind: type) -> None:
    machine.compiled.run = launcher(kind, machine.given, num_ctas=2, launch_pdl=True)
    x = gpu(64)
    start(x)
    assert machine.slow == [
        (
            0,
            (x, None, x, 5, 0.5),
            (2, 3),
            {"SIDE": 16, "SQUARE": True, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": True},
        )
    ]
    assert not machine.given
    start(x)
    assert len(machine.slow) == 1

    values = (x.data_ptr(), None, x.data_ptr(), 5, 0.5, None, None)
    machine.compiled.run(2, 3, 1, 0x5EA0, 0xF00, (4, 1, 128), None, None, None, *values)
    ours, theirs = machine.given
    assert ours == theirs
    assert 0x5EA0 in ours


def test_a_launcher_that_is_not_known_warns_and_takes_the_long_way(machine: Machine) -> None:
    class Later(CudaLauncher):
        def __call__(self, gridX, gridY, gridZ, stream, function, *args):
            self.launch(gridX, gridY, gridZ, function, stream, self.launch_cooperative_grid, self.launch_pdl, *args)

    machine.compiled.run = launcher(Later, machine.given)
    x = gpu(64)
    with pytest.warns(RuntimeWarning, match=re.escape(f"Triton {triton.__version__} launches kernels in a way")):
        start(x)
    start(x)
    assert len(machine.slow) == 2
    assert not machine.given


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        (CudaLauncher, "profile_scratch_size"), (CudaLauncher, "gsan_enabled"), (CudaLauncher, "global_scratch_size"),
        (HIPLauncher, "global_scratch_size"),
    ],
)  # fmt: skip
def test_what_only_triton_can_provide_takes_the_long_way(machine: Machine, kind: type, attribute: str) -> None:
    machine.compiled.run = launcher(kind, machine.given, **{attribute: 1})
    x = gpu(64)
    start(x)
    start(x)
    assert len(machine.slow) == 2
    assert not machine.given


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("chained", [True, False])
def test_with_a_hook_launches_take_the_long_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, chained: bool
) -> None:
    def hook(metadata: object) -> None: ...

    x = gpu(64)
    start(x)
    start(x)
    assert (len(machine.slow), len(machine.given)) == (1, 1)
    runtime = triton.knobs.runtime
    with monkeypatch.context() as patch:
        if chained:
            patch.setattr(getattr(runtime, name), "calls", [hook])
        else:
            patch.setattr(runtime, name, hook)
        start(x)
        start(x, n=2**40)
        start(x, n=2**40)
    assert (len(machine.slow), len(machine.given)) == (4, 1)
    start(x)
    start(x, n=2**40)  # what was compiled under a hook is not kept
    assert (len(machine.slow), len(machine.given)) == (5, 2)
    monkeypatch.setattr(add, "pre_run_hooks", [hook])
    start(x)
    assert (len(machine.slow), len(machine.given)) == (6, 2)


# --- descriptors -----------------------------------------------------------------------------------------------------

PLACES = (0, 2)  # of x and out in `add`
BOXES = {place: Box((4, 16), (16, 1), (2, 16)) for place in PLACES}


class Driver:
    """Encodes a descriptor as a tuple of what it is made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
        self.encoded: list[tuple[Any, ...]] = []
        utils = SimpleNamespace(fill_tma_descriptor=self.fill, fill_tma_descriptor_tiled=self.fill)
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))
        meta = {"swizzle": 1, "elem_size": 4, "elem_type": 7, "block_size": [2, 16], "fp4_padded": False}
        metas = [meta | {"swizzle": n} for n in range(2)]
        types = ("tensordesc<fp32[2, 16]>", "*fp32", "tensordesc<fp32[2, 16]>", "i32", "fp32", "constexpr", "constexpr")
        own = vars(sys.modules[CudaLauncher.__module__])["wrap_handle_tensordesc"]
        wrapped = own(lambda *args: machine.given.append(args), dict(enumerate(types)), metas)
        machine.compiled.run = launcher(CudaLauncher, machine.given, launch=wrapped)
        machine.compiled.metadata = SimpleNamespace(tensordesc_meta=metas)

    def fill(self, *given: Any) -> tuple[Any, ...]:
        self.encoded.append(given)
        return given


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> Driver:
    return Driver(monkeypatch, machine)


def boxed() -> Ready:
    return Ready(add, (2, 3), (5, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2, BOXES)


def test_a_descriptor_reaches_the_c_function_as_triton_gives_it(machine: Machine, driver: Driver) -> None:
    x, y = gpu(64), gpu(64)
    ready = boxed()
    ready(x, y, x)
    (_, args, _, _), *_ = machine.slow
    assert [type(arg).__name__ for arg in args[:3]] == ["TensorDescriptor", "OnGpu", "TensorDescriptor"]
    assert (args[0].base, args[0].shape, args[0].strides, args[0].block_shape) == (x, [4, 16], [16, 1], [2, 16])
    assert not machine.given
    ready(x, y, x)
    assert len(machine.slow) == 1
    values = (args[0], y.data_ptr(), args[2], 5, 0.5, None, None)
    machine.compiled.run(2, 3, 1, 0x5EA0, 0xF00, (4, 1, 128), None, None, None, *values)
    ours, theirs = (
        [list(part) if isinstance(part, (list, tuple)) else part for part in call] for call in machine.given
    )
    assert ours == theirs
    assert driver.encoded[0][0] == x.data_ptr()


def test_a_descriptor_is_encoded_once_for_an_address(
    machine: Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y, z = gpu(64), gpu(64), gpu(64)
    ready = boxed()
    ready(x, None, z)
    for n, (first, last) in enumerate([(x, z), (x, z), (y, z), (z, x), (x, z), (y, x)]):
        ready(first, None, last)
        assert len(driver.encoded) == (2, 2, 3, 5, 5, 5)[n]
        given = [
            part
            for call in (machine.given[-1], machine.given[-1][-1])
            if isinstance(call, (list, tuple))
            for part in call
        ]
        assert [part[0] for part in given if part in driver.encoded] == [first.data_ptr(), last.data_ptr()]
    monkeypatch.setattr(module, "_ENCODED", 5)
    ready(y, None, y)  # all are forgotten, and made anew when they come
    ready(y, None, y)
    assert len(driver.encoded) == 7


def test_other_blocks_are_other_binaries_and_a_box_is_not_a_pointer(machine: Machine, driver: Driver) -> None:
    x = gpu(64)
    boxed()(x, None, x)
    start(x)
    other = {place: Box((4, 16), (16, 1), (4, 16)) for place in PLACES}
    Ready(add, (2, 3), (5, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2, other)(x, None, x)
    assert len(machine.slow) == 3
    farther = {place: Box((9, 16), (32, 1), (2, 16)) for place in PLACES}  # the same binary
    Ready(add, (2, 3), (7, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2, farther)(x, None, x)
    assert len(machine.slow) == 3
    assert driver.encoded[-1][-3:-1] == ([9, 16], [32, 1])


def test_a_driver_that_encodes_otherwise_takes_the_long_way(
    machine: Machine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[CudaLauncher.__module__], "make_tensordesc_arg", lambda descriptor: [descriptor])
    ready = boxed()
    ready(gpu(64), None, gpu(64))
    ready(gpu(64), None, gpu(64))
    assert (len(machine.slow), len(machine.given)) == (2, 0)


@triton.jit
def moved(x, out, SIDE: tl.constexpr, WIDTH: tl.constexpr):
    out.store([0, 0, 0], x.load([1, 2, 0]))


def test_a_kernel_with_descriptors_compiles_without_a_device() -> None:
    box = Box((4, 8, 64), (512, 64, 1), (1, 1, 64))
    with recording() as launches:
        Ready(moved, (1,), (), {"SIDE": 1, "WIDTH": 64}, 4, 1, {0: box, 1: box})(gpu(2048), gpu(2048))
    ptx = compile_for(launches[0], GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "cp.async.bulk.tensor.3d.shared" in ptx
    assert "cp.async.bulk.tensor.3d.global" in ptx


# --- the key ---------------------------------------------------------------------------------------------------------


def test_each_part_of_the_key_compiles_anew(machine: Machine) -> None:
    x, far = gpu(64), gpu(64, index=1)
    changes: list[Callable[[], None]] = [
        lambda: start(x),
        lambda: start(x, SIDE=32),
        lambda: start(x, SQUARE=False),
        lambda: start(x, warps=8),
        lambda: start(x, stages=3),
        lambda: start(x, y=x),
        lambda: start(x[1:]),
        lambda: start(gpu(64, dtype=torch.float16)),
        lambda: start(x, n=2**31),
        lambda: launch(add, (2,), (x, None, x, 5, 0.5), {"SIDE": 16}, 4, 2),
        lambda: start(far),
    ]
    for count, change in enumerate(changes, 1):
        change()
        change()
        assert (len(machine.slow), len(machine.given)) == (count, count)
    assert [device for device, *_ in machine.slow] == [0] * (len(changes) - 1) + [1]
    assert machine.current == 0
    stream = machine.given[-1]
    assert 0x5EA1 in stream


def test_what_a_ready_launch_is_given_is_looked_at_each_time(machine: Machine) -> None:
    """One Ready, called with tensors that differ: each kind compiles once, for the device that it is on."""
    ready = Ready(add, (2, 3), (5, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2)
    x, far, half = gpu(64), gpu(64, index=1), gpu(64, dtype=torch.float16)
    calls = [(x, None, x), (x, x, x), (x[1:], None, x), (x, None, x[1:]), (half, None, x), (far, far, far)]
    for count, tensors in enumerate(calls, 1):
        for _ in range(2):
            ready(*tensors)
        assert (len(machine.slow), len(machine.given)) == (count, count)
        values = (*(each if each is None else each.data_ptr() for each in tensors), 5, 0.5, None, None)
        assert values in (machine.given[-1][-1], machine.given[-1][-len(values) :])
    start(x)  # the same launch made anew finds the same binary
    assert len(machine.slow) == len(calls)


def test_launches_that_share_a_binary_keep_their_grids_and_numbers(machine: Machine) -> None:
    x = gpu(64)
    ready = [Ready(add, (2 + n, 3), (n, 0.5 * n), {"SIDE": 16, "SQUARE": True}, 4, 2) for n in range(3)]
    ready[0](x, None, x)
    for n in (1, 0, 2, 1, 0, 0, 2):
        ready[n](x, None, x)
        given = machine.given[-1]
        assert given[:3] == (2 + n, 3, 1)
        values = (x.data_ptr(), None, x.data_ptr(), n, 0.5 * n, None, None)
        assert values in (given[-1], given[-len(values) :])
    assert len(machine.slow) == 1


def test_a_ready_launch_looks_for_hooks_debug_and_the_device_each_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, far = gpu(64), gpu(64, index=1)
    ready = Ready(add, (2, 3), (5, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2)
    for tensors, slow in ((x, 1), (x, 1), (x, 1), (far, 2), (far, 2), (x, 2)):
        ready(tensors, None, tensors)
        assert len(machine.slow) == slow
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
        ready(x, None, x)
        assert len(machine.slow) == 3
    ready(x, None, x)
    assert len(machine.slow) == 3
    monkeypatch.setattr(triton.knobs.runtime, "debug", not triton.knobs.runtime.debug)
    ready(x, None, x)
    assert len(machine.slow) == 4
    machine.current = 1
    ready(x, None, x)
    assert len(machine.slow) == 4
    assert 0x5EA0 in machine.given[-1]
    with pytest.raises(ValueError, match="must be on a GPU"):
        ready(torch.zeros(64), None, x)


def test_what_no_binary_depends_on_is_not_in_the_key(machine: Machine) -> None:
    x = gpu(64)
    start(x)
    for n in (1, 16, -5, 2**31 - 1, -(2**31)):
        start(gpu(8, 8), n=n, grid=(n % 7,))
    launch(add, (1, 1, 9), (x, None, x, 5, float("nan")), {"SIDE": 16, "SQUARE": True}, 4, 2)
    assert len(machine.slow) == 1
    assert [given[:3] for given in machine.given] == [(1, 1, 1), (2, 1, 1), (2, 1, 1), (1, 1, 1), (5, 1, 1), (1, 1, 9)]


@pytest.mark.parametrize("target", [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)], ids=lambda t: t.backend)
def test_keys_tell_apart_what_triton_tells_apart(monkeypatch: pytest.MonkeyPatch, target: GPUTarget) -> None:
    monkeypatch.setattr(module, "_HIP", target.backend == "hip")
    specialize = create_function_from_signature(add.signature, add.params, make_backend(target))
    half, small = torch.zeros(64, dtype=torch.float16), torch.zeros(64)
    large = torch.empty(2**29 + 1, device="meta")  # 2 GiB and 4 bytes
    tensors = (None, half, half[1:], half[8:], small, small[1:], small[4:], small.double(), small.int(), large)
    numbers = (0, 1, 16, 5, -1, 2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**40, 1.0, 0.5)
    calls = [(x, x, small, 5, 0.5) for x in tensors] + [(small, None, small, n, 0.5) for n in numbers]
    kinds = [(module._describe(args[:3])[2], module._kinds(args[3:])) for args in calls]
    theirs = [specialize(*args, SIDE=16)[1] for args in calls]
    for i, j in itertools.combinations(range(len(calls)), 2):
        assert (kinds[i] == kinds[j]) == (theirs[i] == theirs[j]), (calls[i], calls[j])
    assert len({str(each) for each in theirs}) > 8


def test_none_may_be_left_out_at_the_tensors_end(machine: Machine) -> None:
    """`add` takes x, y and out: to Triton, to the C function and to who records, the call is the whole one."""
    x = gpu(64)
    ready = Ready(add, (2, 3), (5, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2)
    for given in ((x,), (x, x)):
        whole = (*given, *(None,) * (3 - len(given)))
        for each in (given, whole):
            for _ in range(2):
                ready(*each)
            machine.slow, slow = [], machine.slow
            assert [call[1] for call in slow] == [(*whole, 5, 0.5)]
        addresses = [y if y is None else y.data_ptr() for y in whole]
        values = (*addresses, 5, 0.5, None, None)
        assert machine.given
        assert all(values in (call[-1], call[-len(values) :]) for call in machine.given)  # packed, or one by one
        machine.given.clear()
        with recording() as made:
            ready(*given)
        assert made[0].args == (*whole, 5, 0.5)


# --- what must not pass ----------------------------------------------------------------------------------------------


def test_wrong_calls_say_so(machine: Machine) -> None:
    x = gpu(64)
    with pytest.raises(ValueError, match=r"2\^31 programs"):
        start(x, grid=(2**20, 2**12))
    with pytest.raises(ValueError, match="must be on a GPU"):
        start(torch.zeros(64))
    with pytest.raises(ValueError, match=r"devices \[-1, 0\]"):
        start(x, y=torch.zeros(64))
    with pytest.raises(TypeError, match="not bool"):
        launch(add, (1,), (x, None, x, True, 0.5), {"SIDE": 16}, 4, 2)
    with pytest.raises(ValueError, match="do not fit its parameters"):
        launch(add, (1,), (x, None, x, 5), {"SIDE": 16}, 4, 2)
    with pytest.raises(ValueError, match="do not fit its parameters"):
        launch(add, (1,), (x, None, x, 0.5), {"SIDE": 16}, 4, 2)
    with pytest.raises(ValueError, match="do not fit its parameters"):
        launch(add, (1,), (x, None, x, 5, 0.5, 16), {"SIDE": 16}, 4, 2)
    with pytest.raises(ValueError, match="do not fit its parameters"):
        launch(add, (1,), (x, None, x, 5, 0.5), {"SQUARE": True}, 4, 2)
    with pytest.raises(ValueError, match="the int n must be in its do_not_specialize"):
        launch(specialised, (1,), (x, 5), {"SIDE": 16}, 4, 2)
    assert not machine.slow
    assert not machine.given


# --- recording, the interpreter --------------------------------------------------------------------------------------


def test_recording_launches_nothing(machine: Machine) -> None:
    x = torch.empty(64, device="meta")
    with recording() as outer:
        start(x)
        with recording() as inner:
            start(x, n=7, grid=(1,), warps=8)
        start(x, stages=4)
    assert [(each.grid, each.warps, each.stages) for each in outer] == [((2, 3), 4, 2), ((2, 3), 4, 4)]
    assert inner == [Launch(add, (1,), (x, None, x, 7, 0.5), {"SIDE": 16, "SQUARE": True}, 8, 2)]
    assert not machine.slow
    with pytest.raises(ZeroDivisionError), recording():
        raise ZeroDivisionError
    start(gpu(64))
    assert len(machine.slow) == 1


INTERPRETED = """
import importlib.util, sys, torch
import triton, triton.language as tl
from tilewise.kernels.launch import Launch, compile_for, launch

@triton.jit(do_not_specialize=["n"])
def add(x, y, out, n, scale, SIDE: tl.constexpr, SQUARE: tl.constexpr):
    i = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    value = tl.load(x + i, mask=i < n)
    if SQUARE:
        value = value * value
    tl.store(out + i, value * scale, mask=i < n)

x, out = torch.arange(40.0), torch.full((40,), -1.0)
for _ in range(2):
    launch(add, (3,), (x, None, out, 37, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2)
assert torch.equal(out[:37], x[:37] ** 2 / 2), out
assert (out[37:] == -1).all()
try:
    compile_for(Launch(add, (3,), (x, None, out, 37, 0.5), {"SIDE": 16, "SQUARE": True}, 4, 2), None)
except TypeError as error:
    print(error)
"""


def test_in_the_interpreter_kernels_run_on_the_cpu(tmp_path: Path) -> None:
    program = tmp_path / "interpreted.py"  # Triton reads a kernel's source
    program.write_text(INTERPRETED)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "unset TRITON_INTERPRET" in done.stdout


# --- compiling with no device ----------------------------------------------------------------------------------------


def recorded(n_tiles: int = 3, *, rows: int = 32, d: int = 64, warps: int = 4, descriptor: bool = False) -> Launch:
    x = torch.empty(n_tiles * rows, d, dtype=torch.float16, device="meta")
    out = torch.empty(rows, rows, device="meta")
    with recording() as launches:
        launch(products, (1,), (x, out, n_tiles), {"ROWS": rows, "D": d, "DESCRIPTOR": descriptor}, warps, 1)
    return launches[0]


@pytest.mark.parametrize("capability", [75, 80, 90, 100])
def test_a_recorded_launch_compiles_for_nvidia(capability: int) -> None:
    compiled = compile_for(recorded(), GPUTarget("cuda", capability, 32))
    assert re.search(rf"\.target sm_{capability}a?\b", compiled.asm["ptx"])
    taken = resources(compiled)
    assert 16 < taken.registers <= 255
    assert taken.spilled == 0
    assert taken.shared == compiled.metadata.shared > 0


def test_a_recorded_launch_compiles_for_amd() -> None:
    compiled = compile_for(recorded(), GPUTarget("hip", "gfx942", 64))
    taken = resources(compiled)
    assert f".vgpr_count:     {taken.registers}" in compiled.asm["amdgcn"]
    assert taken.registers > 8
    assert taken.spilled == 0
    assert taken.shared == compiled.metadata.shared > 0


def test_a_uniform_register_that_nothing_wrote_is_seen() -> None:
    listing = """
        /*0010*/                   UMOV UR4, 0x400 ;                            /* 0x0000040000047882 */
        /*0020*/              @!P0 UIADD3.64 UR10, UR4, 0x40, URZ ;
        /*0030*/                   UIADD3 UR18, UP1, UR18, 0x40, URZ ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, R84, gdesc[UR8].tnspB, RZ, !UPT ;
        /*0050*/                   HGMMA.64x32x16.F32.BF16 R24, R92, gdesc[UR16].tnspB, R24, gsb0 ;
        /*0060*/                   STG.E desc[UR6][R2.64], R4 ;
    """
    assert module._unwritten(listing) == {18, 19, 6}


def test_spills_are_what_ptxas_counts(tmp_path: Path) -> None:
    compiled = compile_for(recorded(rows=64, warps=4, d=32), GPUTarget("cuda", 80, 32))
    again = compile_for(recorded(rows=128, warps=2, d=16), GPUTarget("cuda", 80, 32))
    counts = []
    for each in (compiled, again):
        source = tmp_path / "kernel.ptx"
        source.write_text(each.asm["ptx"])
        tool = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_80", str(source), "-o", str(tmp_path / "cubin")]
        log = subprocess.run(tool, capture_output=True, text=True, check=True).stderr
        bytes_of = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        used = re.search(r"Used (\d+) registers", log)
        assert bytes_of
        assert used
        counts.append((int(used[1]), int(bytes_of[1]) + int(bytes_of[2])))
    assert [(taken.registers, taken.spilled) for taken in map(resources, (compiled, again))] == counts
    assert counts[1][1] > 0


def test_tensors_are_taken_to_be_aligned() -> None:
    """Only dtypes count: one binary for a CPU tensor at an odd address, and one on meta."""
    odd, meta = torch.zeros(65)[1:], torch.empty(64, device="meta")
    launches = [Launch(add, (1,), (x, None, x, 5, 0.5), {"SIDE": 1024}, 4, 2) for x in (odd, meta)]
    first, second = (compile_for(each, GPUTarget("cuda", 80, 32)) for each in launches)
    assert first.hash == second.hash
    assert first.asm["ttir"].count("tt.divisibility = 16") == 2  # x and out; y is None


def test_device_descriptors_ask_for_scratch() -> None:
    compiled = compile_for(recorded(descriptor=True), GPUTarget("cuda", 90, 32))
    assert compiled.metadata.global_scratch_size >= 128
    assert compiled.metadata.global_scratch_align <= 512  # what PyTorch's allocator aligns to
    assert compile_for(recorded(), GPUTarget("cuda", 90, 32)).metadata.global_scratch_size == 0
