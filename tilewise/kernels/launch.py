"""Launching a Triton or Gluon kernel at little host cost; recording launches; compiling a recorded one without a device.

`kernel[grid](...)` binds, specialises and hashes every argument at each call, in Python: tens of microseconds, more
than a small attention takes on the device. Here a call's key is whatever Triton's choice of a binary depends on, and
nothing else: the first call of a key goes through `kernel[grid](...)`, later ones to that binary's launcher in C. What
the tensors do not tell of it is made once, in a `Ready`.

What that launcher expects differs between Triton's versions (3.6 to 3.9 have two forms on CUDA), and a wrong argument
there is a wrong result on the device. So the call that Triton's own Python makes is read from its source, once: a form
that is not known here warns and goes through `kernel[grid](...)` for good. Descriptors (TMA), which Triton encodes anew
at each launch, are kept by address.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, MockTensor, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

_HIP = torch.version.hip is not None
_FUSED = {"enable_fp_fusion": True}  # S * scale - m in one instruction; newer Tritons have it off unless asked
_EARLY = {"launch_pdl": True}  # begun before the kernel in front of it ends, for whose results it waits itself
_MISALIGNED, _WITHIN_2_GIB = "misaligned", "within 2 GiB"  # what Triton notes of a pointer, beside its dtype
_WIDE = "64 bits"  # and of an int


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: the arguments of `launch`."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constexprs: dict[str, object]
    warps: int
    stages: int
    early: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """How a tensor is given to a kernel as a descriptor (TMA) and not as a pointer.

    shape, strides: in elements; the last stride is 1, the others are multiples of 16 bytes.
    block: what one load or store moves.
    layout: of the block in shared memory, for a Gluon kernel.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    layout: Any = None

    def around(self, tensor: torch.Tensor) -> Any:
        given = (tensor, list(self.shape), list(self.strides), list(self.block))
        if self.layout is None:
            return TensorDescriptor(*given)
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

        return GluonDescriptor(*given, self.layout)


Boxes = dict[int, Box]  # by the tensor's place among the arguments
NO_BOXES: Boxes = {}
Encode = Callable[[Any], list[Any]]  # a descriptor -> what the C function takes of it
Call = Callable[[int, list[Any]], None]  # (stream, the tensors' addresses)
Form = Callable[[Any, tuple[int, ...], tuple[Any, ...]], Call]  # (compiled kernel, grid, what follows the addresses)


@dataclass(frozen=True, slots=True)
class _Binary:
    """A compiled kernel, ready to be called. It keeps its kernel alive, whose id is in the key, and its module."""

    kernel: Any
    compiled: Any
    form: Form | None  # None: through kernel[grid]
    unused: int  # places that the launcher has for constexprs: it does not look at what is there
    encoders: tuple[Encode, ...] = ()  # of its descriptors, in their order

    def call(self, sizes: tuple[int, ...], numbers: tuple[int | float | None, ...]) -> Call:
        assert self.form is not None
        return self.form(self.compiled, sizes, (*numbers, *(None,) * self.unused))


# A binary is found in two steps: by what a Ready knows when it is made, and by what only its tensors tell at a call.
_binaries: dict[tuple[object, ...], dict[tuple[object, ...], _Binary]] = {}
_recorders: list[list[Launch]] = []  # of the process, not of the thread: autograd runs backward in its own threads


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within it, `launch` appends what it was given to the list instead of launching. The innermost one records."""
    launches: list[Launch] = []
    _recorders.append(launches)
    try:
        yield launches
    finally:
        _recorders.remove(launches)


def launch(
    kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], constexprs: dict[str, object], warps: int, stages: int,
    boxes: Boxes = NO_BOXES,
) -> None:  # fmt: skip
    """Launch `kernel` on the device of its tensors and that device's current stream, as PyTorch has them.

    kernel: a triton.jit function. Its run-time parameters come first and take `args` in order: first tensors of one
        device or None, then ints and floats. Ints must be do_not_specialize. Its tl.constexpr parameters come last and
        are given by name.
    grid: one to three sizes, fewer than 2^31 programs in all. A size of 0 launches nothing.
    boxes: which of the tensors are given as descriptors.

    In Triton's interpreter (TRITON_INTERPRET=1) this is `kernel[grid](...)`, and tensors may lie on the CPU.
    TypeError and ValueError: what is said above does not hold. Those of Triton and of the driver pass through.
    """
    tensors = list(itertools.takewhile(lambda arg: arg is None or isinstance(arg, torch.Tensor), args))
    Ready(kernel, grid, args[len(tensors) :], constexprs, warps, stages, boxes)(*tensors)


class Ready:
    """A `launch` with all but its tensors, to be called with them, again and again: it is checked and keyed once.

    None may be left out at the tensors' end: a dozen of them takes a microsecond.
    numbers: the ints and floats that follow the tensors in the kernel's arguments. early: `_EARLY`.
    """

    __slots__ = (
        "_binaries", "_calls", "_sizes", "boxes", "constexprs", "early", "grid", "kernel", "numbers", "stages", "warps",
    )  # fmt: skip

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], numbers: tuple[int | float, ...], constexprs: dict[str, object],
        warps: int, stages: int, boxes: Boxes = NO_BOXES, early: bool = False,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.numbers, self.boxes = kernel, grid, numbers, boxes
        self.constexprs, self.warps, self.stages, self.early = constexprs, warps, stages, early
        x, y, z = self._sizes = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        if x * y * z >= 2**31:  # the launcher multiplies in 32 bits, and launches nothing where that wraps below 1
            raise ValueError(f"{kernel.__name__}: a grid of {grid} has 2^31 programs or more")
        blocks = ((place, box.block, box.layout) for place, box in boxes.items())
        key = (id(kernel), warps, stages, early, *_kinds(numbers), *constexprs, *constexprs.values(), *blocks)
        self._binaries = _binaries.setdefault(key, {})
        # Those of its binaries, and what puts descriptors in the addresses' places.
        self._calls: dict[tuple[object, ...], tuple[Call, Callable[..., list[Any]] | None]] = {}

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        if _recorders:
            args = (*self._boxed(tensors), *self._left_out(tensors), *self.numbers)
            _recorders[-1].append(
                Launch(self.kernel, self.grid, args, self.constexprs, self.warps, self.stages, self.early)
            )
            return
        kernel = self.kernel
        if not isinstance(kernel, JITFunction):
            self._through_triton((*tensors, *self._left_out(tensors)))
            return
        device, addresses, kinds = _describe(tensors)
        if device is None:
            device = torch.cuda.current_device()
        elif device < 0:
            raise ValueError(f"{kernel.__name__}: its tensors must be on a GPU, or TRITON_INTERPRET=1 set")
        elif device != _current_device():
            with torch.cuda.device(device):
                self(*tensors)
            return
        key = (*kinds, device, knobs.runtime.debug)
        found = self._calls.get(key)
        if found is None or _hooked(kernel):
            self._seldom(tensors, device, key)
            return
        call, encoded = found
        call(_stream(device), addresses if encoded is None else encoded(tensors, addresses))

    def _seldom(self, tensors: tuple[torch.Tensor | None, ...], device: int, key: tuple[object, ...]) -> None:
        """A launch of this key that is the first, or that Triton has to make."""
        binary, hooked = self._binaries.get(key), _hooked(self.kernel)
        left_out = self._left_out(tensors)
        if binary is not None and binary.form is not None and not hooked:  # another Ready has launched it
            encoded = _encoded(self.boxes, binary.encoders) if self.boxes else None
            self._calls[key] = binary.call(self._sizes, (*left_out, *self.numbers)), encoded
            self(*tensors)
            return
        tensors = (*tensors, *left_out)
        _check(self.kernel, (*tensors, *self.numbers), self.constexprs)
        compiled = self._through_triton(tensors)  # None where a hook of the user's took the compilation over
        if binary is None and compiled is not None and not _hooked(self.kernel):
            self._binaries[key] = _binary_of(self.kernel, compiled, len(tensors) + len(self.numbers), len(self.boxes))

    def _boxed(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[Any, ...]:
        if not self.boxes:
            return tensors
        return tuple(
            [self.boxes[n].around(x) if n in self.boxes and x is not None else x for n, x in enumerate(tensors)]
        )

    def _left_out(self, tensors: tuple[torch.Tensor | None, ...]) -> tuple[None, ...]:
        """A None for each tensor that the call leaves out: the constexprs' places begin where those of numbers end."""
        names = self.kernel.arg_names
        first = min((names.index(name) for name in self.constexprs if name in names), default=0)
        return (None,) * (first - len(self.numbers) - len(tensors))

    def _through_triton(self, tensors: tuple[torch.Tensor | None, ...]) -> Any:
        return self.kernel[self.grid](
            *self._boxed(tensors),
            *self.numbers,
            **self.constexprs,
            num_warps=self.warps,
            num_stages=self.stages,
            **(_EARLY if self.early else {}),
            **_FUSED,
        )


_ENCODED = 1024  # descriptors that a Ready keeps of a binary: a training step has some dozens of addresses


def _encoded(boxes: Boxes, encoders: tuple[Encode, ...]) -> Callable[..., list[Any]]:
    """What puts descriptors in the place of addresses. All but the address is the Ready's: it has what was made before."""
    places = sorted(boxes, reverse=True)  # from the last on, for what is put in moves what follows
    encode = dict(zip(sorted(boxes), encoders, strict=True))
    made: dict[tuple[int, int], list[Any]] = {}

    def encoded(tensors: tuple[torch.Tensor | None, ...], addresses: list[Any]) -> list[Any]:
        for place in places:
            key = place, addresses[place]
            found = made.get(key)
            if found is None:
                if len(made) >= _ENCODED:
                    made.clear()
                found = made[key] = encode[place](boxes[place].around(tensors[place]))  # type: ignore[arg-type]
            addresses[place : place + 1] = found
        return addresses

    return encoded


def _describe(tensors: tuple[torch.Tensor | None, ...]) -> tuple[int | None, list[Any], list[Any]]:
    """(device of the first, -1 for the CPU; their addresses; what the binary depends on of them)."""
    addresses: list[Any] = list(tensors)  # None stays
    kinds: list[Any] = list(tensors)
    device: int | None = None
    for place, tensor in enumerate(tensors):
        if tensor is None:
            continue
        addresses[place] = address = tensor.data_ptr()
        kinds[place] = tensor.dtype
        if address & 15:
            kinds.append((place, _MISALIGNED))
        if _HIP and tensor.untyped_storage().nbytes() <= 0x7FFFFFFF:
            kinds.append((place, _WITHIN_2_GIB))
        if device is None:
            device = tensor.get_device()
    return device, addresses, kinds


def _kinds(numbers: tuple[int | float, ...]) -> list[object]:
    """What the binary depends on of the numbers: of each its type, and of an int whether 32 bits hold it. TypeError."""
    kinds: list[object] = []
    for number in numbers:
        kind = type(number)
        if kind is not int and kind is not float:
            raise TypeError(f"a kernel's arguments are tensors, None, ints and floats, not {kind.__name__}")
        kinds.append(kind if kind is float or -0x80000000 <= number <= 0x7FFFFFFF else _WIDE)
    return kinds


def _current_device() -> int:
    """As torch.cuda.current_device(), which first makes sure of CUDA: who has a tensor on a GPU has that."""
    return torch._C._cuda_getDevice()


def _stream(device: int) -> int:
    """The handle of PyTorch's current stream on `device`."""
    return torch._C._cuda_getCurrentRawStream(device)  # a torch.cuda.Stream object would cost microseconds


def _hooked(kernel: Any) -> bool:
    """Is there a hook that Triton's own launch would call, a profiler's for one?"""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(
        kernel.pre_run_hooks
        or getattr(enter, "calls", enter)  # a chain, which always is there, a function, or None
        or getattr(leave, "calls", leave)
        or knobs.runtime.add_stages_inspection_hook
    )


def _check(kernel: Any, args: tuple[Any, ...], constexprs: dict[str, object]) -> None:
    """ValueError unless a call's key determines its binary, and its values are the launcher's."""
    runtime, rest = kernel.params[: len(args)], kernel.params[len(args) :]
    wrong = [p.name for p in runtime if p.is_constexpr]
    wrong += [p.name for p in rest if not p.is_constexpr or (p.name not in constexprs and not p.has_default)]
    # None for an int: numbers are missing, and what stands before them was taken for tensors left out.
    wrong += [p.name for p, arg in zip(runtime, args, strict=False) if arg is None and p.do_not_specialize]
    if wrong or len(runtime) < len(args):
        raise ValueError(
            f"{kernel.__name__}: {len(args)} run-time arguments and {', '.join(constexprs) or 'no constexprs'} do not "
            f"fit its parameters {', '.join(kernel.arg_names)}"
        )
    for parameter, arg in zip(runtime, args, strict=True):
        if isinstance(arg, int) and not parameter.do_not_specialize:
            raise ValueError(f"{kernel.__name__}: the int {parameter.name} must be in its do_not_specialize")
    devices = {arg.get_device() for arg in args if isinstance(arg, torch.Tensor)}
    if len(devices) > 1:
        raise ValueError(f"{kernel.__name__}: its tensors are on devices {sorted(devices)} (-1: the CPU), not on one")


# --- Triton's launchers ----------------------------------------------------------------------------------------------


def _cuda_flat(compiled: Any, sizes: tuple[int, ...], rest: tuple[Any, ...]) -> Call:
    """Triton 3.6: a C function for each signature; the kernel's arguments, constexprs too, follow one another."""
    launcher, function, metadata, (x, y, z) = compiled.run, compiled.function, compiled.packed_metadata, sizes
    start, cooperative, dependent = _in_c(launcher), launcher.launch_cooperative_grid, launcher.launch_pdl

    def call(stream: int, addresses: list[Any]) -> None:
        start(
            x, y, z, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
            *addresses, *rest,
        )  # fmt: skip

    return call


def _cuda_packed(compiled: Any, sizes: tuple[int, ...], rest: tuple[Any, ...]) -> Call:
    """Triton 3.7 to 3.9: one C function for all; the kernel's arguments, constexprs too, in one tuple at the end."""
    launcher, function, metadata, (x, y, z) = compiled.run, compiled.function, compiled.packed_metadata, sizes
    start, cooperative, dependent = _in_c(launcher), launcher.launch_cooperative_grid, launcher.launch_pdl
    annotations, signature = launcher.arg_annotations, launcher.kernel_signature

    def call(stream: int, addresses: list[Any]) -> None:
        start(
            x, y, z, stream, function, cooperative, dependent, metadata, None, None, None, None, None,
            annotations, signature, (*addresses, *rest),
        )  # fmt: skip

    return call


def _in_c(launcher: Any) -> Any:
    """The C function of a CUDA launcher, without the Python in front of it that encodes descriptors."""
    wrapped = inspect.getclosurevars(launcher.launch).nonlocals if inspect.isfunction(launcher.launch) else {}
    return wrapped.get("launcher", launcher.launch)


def _encoders(compiled: Any) -> tuple[Encode, ...] | None:
    """Of each of its descriptors, by the function that Triton itself calls; None where that is not known here."""
    metas = getattr(compiled.metadata, "tensordesc_meta", None) or ()
    encode = getattr(sys.modules[type(compiled.run).__module__], "make_tensordesc_arg", None)
    if encode is None or _in_c(compiled.run) is compiled.run.launch:
        return None
    names = list(inspect.signature(encode).parameters)
    if names not in (["arg", "metadata"], ["arg", "metadata", "_"]):
        return None
    rest = (None,) * (len(names) - 2)
    return tuple(functools.partial(lambda meta, box: encode(box, meta, *rest), meta) for meta in metas)


def _hip(compiled: Any, sizes: tuple[int, ...], rest: tuple[Any, ...]) -> Call:
    """Any of them on an AMD GPU: through the Python in front of the C function, which is alike in all."""
    launcher, function, metadata, (x, y, z) = compiled.run, compiled.function, compiled.packed_metadata, sizes

    def call(stream: int, addresses: list[Any]) -> None:
        launcher(x, y, z, stream, function, metadata, None, None, None, *addresses, *rest)

    return call


_GRID = ("gridX", "gridY", "gridZ", "stream", "function")
_CUDA = (*_GRID, "self.launch_cooperative_grid", "self.launch_pdl")
_HOOKS = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
_SCRATCH = ("global_scratch", "profile_scratch")
_PACKED = ("self.arg_annotations", "self.kernel_signature")

# The call of the C function in the source of a launcher's __call__, and how it is made here.
_FORMS: dict[tuple[str, ...], Form] = {
    (*_CUDA, *_SCRATCH, "*args"): _cuda_flat,
    (*_CUDA, *_HOOKS, *_SCRATCH, *_PACKED, "args"): _cuda_packed,
    (*_CUDA, *_HOOKS, *_SCRATCH, *_PACKED, "kernel_args"): _cuda_packed,  # args, and a sanitizer's where one is on
    ("self.launch_cooperative_grid", *_GRID, "profile_scratch", "*args"): _hip,
    ("self.launch_cooperative_grid", *_GRID, "profile_scratch", *_HOOKS, "self.warp_size", *_PACKED, "args"): _hip,
    ("self.launch_cooperative_grid", *_GRID, *_SCRATCH, *_HOOKS, "self.warp_size", *_PACKED, "args"): _hip,
}


@functools.cache
def _form(launcher: type) -> Form | None:
    """How the launchers of this class are called, from its source. Unknown: None, after a RuntimeWarning."""
    found: tuple[str, ...] = ()
    parameters: list[str] = []
    try:
        parameters = list(inspect.signature(launcher.__call__).parameters)
        tree = ast.parse(textwrap.dedent(inspect.getsource(launcher.__call__)))
    except (OSError, TypeError, ValueError):  # there is no source
        tree = ast.Module([], [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "self.launch" and not node.keywords:
            found = tuple(ast.unparse(argument) for argument in node.args)
    known = parameters in (["self", *_GRID, "args"], ["self", *_GRID, *_HOOKS, "args"])
    if not known or found not in _FORMS:
        warnings.warn(
            f"Triton {triton.__version__} launches kernels in a way that tilewise does not know "
            f"({launcher.__module__}.{launcher.__qualname__}): each launch takes longer on the host",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return _FORMS[found]


def _binary_of(kernel: Any, compiled: Any, runtime: int, boxes: int) -> _Binary:
    """`compiled`, whose first `runtime` parameters are not constexprs, `boxes` of them descriptors, ready to be called."""
    launcher = compiled.run
    form = _form(launcher.__class__)
    # What only Triton's own launch provides: memory for what a kernel makes itself, or for an instrumented one.
    theirs = ("global_scratch_size", "profile_scratch_size", "gsan_enabled")
    encoders = _encoders(compiled) if boxes and form is not None else ()
    if any(getattr(launcher, name, 0) for name in theirs) or encoders is None or len(encoders) != boxes:
        form = None
    return _Binary(kernel, compiled, form, len(kernel.arg_names) - runtime, encoders or ())


# --- with no device --------------------------------------------------------------------------------------------------


def compile_for(launch: Launch, target: GPUTarget) -> CompiledKernel:
    """The kernel of a recorded launch, compiled for `GPUTarget("cuda", 90, 32)`, `GPUTarget("hip", "gfx942", 64)`, ...

    Its tensors may be on any device, "meta" too: only their dtypes count. They are taken to be aligned to 16 bytes, and
    on AMD GPUs to be no larger than 2 GiB. TypeError in the interpreter, which has no kernels to compile.
    """
    kernel = launch.kernel
    if not isinstance(kernel, JITFunction):
        raise TypeError(f"{kernel!r} is not a compiled kernel: unset TRITON_INTERPRET")
    _check(kernel, launch.args, launch.constexprs)
    args = [MockTensor(arg.dtype) if isinstance(arg, torch.Tensor) else arg for arg in launch.args]
    keywords = {**launch.constexprs, "num_warps": launch.warps, "num_stages": launch.stages, **_FUSED}
    keywords |= _EARLY if launch.early else {}
    backend = make_backend(target)
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *args, **keywords
    )
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    source_of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_of(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=options.__dict__)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes.

    registers: of a thread (on AMD GPUs its vector registers)
    spilled: bytes of a thread that the code stores to and loads from local memory, each instruction counted once, as
        `ptxas -v` counts (on AMD GPUs the bytes of the registers that are spilled)
    shared: bytes of a block of threads
    unwritten: uniform registers that are read before any instruction, in the order of the code, writes them: ptxas erred
        (12.8 does, see `triton/options.widths`), and the kernel's results are wrong
    """

    registers: int
    spilled: int
    shared: int
    unwritten: int = 0


def resources(compiled: CompiledKernel) -> Resources:
    """What a kernel from `compile_for` takes, read from its binary. RuntimeError where it does not say."""
    if compiled.metadata.target.backend == "hip":
        listing = compiled.asm["amdgcn"]
        return Resources(
            registers=_number(r"\.vgpr_count:\s*(\d+)", listing),
            spilled=4 * _number(r"\.vgpr_spill_count:\s*(\d+)", listing),
            shared=compiled.metadata.shared,
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "--dump-sass", file.name]
        listing = subprocess.run(tool, capture_output=True, text=True, check=True).stdout
    if "EXIT" not in listing:
        raise RuntimeError(f"cuobjdump lists no instructions of {compiled.name}")
    widths = re.findall(r"\s(?:STL|LDL)(?:\.[A-Z]\w*)*(?:\.(64|128))?(?:\.[A-Z]\w*)*\s", listing)
    return Resources(
        registers=_number(r"\bREG:(\d+)", listing),
        spilled=sum(int(width or 32) // 8 for width in widths),
        shared=compiled.metadata.shared,
        unwritten=len(_unwritten(listing)),
    )


def _unwritten(listing: str) -> set[int]:
    """The uniform registers of NVIDIA's listing that are read first and written later, or never."""
    written: set[int] = set()
    missing: set[int] = set()
    for name, text in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*) +([^;]*);", listing):
        first, _, others = text.partition(",")
        target = re.fullmatch(r"UR(\d+)", first.strip())
        # A descriptor takes two registers. A wgmma's operand names four: that of the matrix that is always in memory is in
        # the last two.
        of_two = {int(n) + 2 * ("GMMA" in name) for n in re.findall(r"gdesc\[UR(\d+)\]", text)}
        reads = of_two | {n + 1 for n in of_two}
        plain = re.sub(r"gdesc\[UR\d+\]", "", others if target else text)
        reads |= {int(n) for n in re.findall(r"\bUR(\d+)\b", plain)}
        missing |= reads - written
        if target:
            wide = 4 if "128" in name else 2 if "64" in name or "WIDE" in name else 1
            written |= set(range(int(target[1]), int(target[1]) + wide))
    return missing


def _number(pattern: str, listing: str) -> int:
    found = re.search(pattern, listing)
    if found is None:
        raise RuntimeError(f"{pattern!r} is not in the listing of a kernel's binary")
    return int(found[1])
