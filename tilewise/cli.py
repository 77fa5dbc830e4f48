"""The command line: `tilewise demo | explain | check | bench | doctor`. It needs the extra `cli`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

try:
    import matplotlib  # noqa: F401  (the demo draws)
    import rich  # noqa: F401
    import typer
except ModuleNotFoundError as missing:
    sys.exit(f"tilewise: the command line needs {missing.name}. Install it with: pip install 'tilewise[cli]'")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .algorithm.io_model import GPU, GPUS
from .examples.char_gpt import Size, standard_attention
from .mask import Band, causal, sliding_window
from .report import breakdown, cost, figures, hierarchy, io_figures, measure, page, tables, training, units
from .report import check as checking
from .report import doctor as diagnosis

LARGEST_DIFFERENCE = 1e-3  # of the two loss curves, in nats per character: what the demo promises

app = typer.Typer(
    help="Exact attention for PyTorch, tile by tile.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console(highlight=False)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("tilewise_demo.png"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each model.")] = 200,
    context: Annotated[int, typer.Option(min=2, help="Tokens that the models see at once.")] = Size.context,
    longest: Annotated[int, typer.Option(min=256, help="The last sequence length of the table.")] = 4096,
    seed: int = 0,
) -> None:
    """Train the same small GPT with standard attention and with tilewise; compare losses, time, memory and bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "one CPU thread"
    size = Size(context=context)
    console.print(
        f"A character-level GPT ({size.layers} layers, {size.heads} heads of {size.width // size.heads}, context "
        f"{size.context}) learns Genesis, twice from seed {seed}.\n"
    )
    with measure.one_thread():
        curves = _train(steps, size, seed, device)
    standard, ours = curves.final()
    console.print(
        f"\nloss, mean of the last {min(20, steps)} steps:   standard {standard:.4f}   tilewise {ours:.4f}  nats"
    )
    agree = curves.largest_difference < LARGEST_DIFFERENCE
    console.print(
        f"largest difference between the curves: {curves.largest_difference:.1e} nats "
        f"({'below' if agree else 'NOT below'} {LARGEST_DIFFERENCE:g})\n"
    )
    lengths = [n for n in (256 << i for i in range(32)) if n <= longest]
    measured = []
    with measure.one_thread(), console.status("measuring") as status:
        for length in lengths:
            status.update(f"measuring attention of {length} tokens")
            measured.append(measure.measure(length, device))
    console.print(*tables.measurements(lengths, measured, name), sep="\n")
    figures.demo(curves, lengths, measured, out)
    console.print(f"picture: {out}")
    if not agree:
        raise typer.Exit(1)


def _train(steps: int, size: Size, seed: int, device: str) -> training.Curves:
    """Both trainings under a progress bar that shows their losses."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    curves = training.Curves()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, loss="")
        runs = training.compare(standard_attention, measure.tilewise_attention, steps, size, seed, device)
        for curves in runs:
            loss = f"standard {curves.standard[-1]:.4f}  tilewise {curves.tilewise[-1]:.4f}"
            progress.update(task, advance=1, loss=loss)
    return curves


@app.command()
def explain(
    seqlen: Annotated[int, typer.Option(min=1, help="Queries and keys.")] = 1024,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    sram: Annotated[float, typer.Option(min=1, help="On-chip memory in KiB.")] = 100,
    is_causal: Annotated[bool, typer.Option("--causal", help="Each query sees the keys up to its own.")] = False,
    window: Annotated[int | None, typer.Option(min=0, help="Causal, with so many keys before the query's own.")] = None,
    dropout: Annotated[bool, typer.Option("--dropout", help="With dropout of P.")] = False,
    heads: Annotated[int, typer.Option(min=1)] = 16,
    batch: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(help=", ".join(cost.ELEMENT_BYTES))] = "fp16",
    gpu: Annotated[str, typer.Option(help=f"Whose time to predict: {', '.join(GPUS)}, or here.")] = "A100",
    pictures: Annotated[Path | None, typer.Option("--figures", help="Draw it, too: PNGs in this folder.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page that plays recorded runs, of sizes of its own, and no tables.")
    ] = None,
) -> None:
    """Bytes, flops, memory and time of standard attention and FlashAttention, and where the difference comes from.

    The defaults are the case of the FlashAttention paper: d = 64 and 100 KB of on-chip memory.
    """
    if html is not None:
        _write_page(html)
        return
    if dtype not in cost.ELEMENT_BYTES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(cost.ELEMENT_BYTES)}", param_hint="--dtype")
    if pictures is not None and dtype == "fp32":
        raise typer.BadParameter("they show time, and no time is known of fp32", param_hint="--figures")
    card = _card(gpu)
    band = sliding_window(window) if window is not None else causal if is_causal else Band()
    question = cost.Question(seqlen, head_dim, sram, band, heads, batch, dtype, dropout)
    for part in tables.explanation(question, card):
        console.print(part)
    if pictures is not None:
        _draw(pictures, question, card)


def _card(name: str) -> GPU:
    """One of GPUS by its name, or the present one, if it is one of them."""
    if name.lower() == "here":
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        found = hierarchy.known(device)
        if found is None:
            raise typer.BadParameter(f"here is {device}: give one of {', '.join(GPUS)}", param_hint="--gpu")
        return found
    if name.upper() not in GPUS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(GPUS)}", param_hint="--gpu")
    return GPUS[name.upper()]


def _draw(folder: Path, question: cost.Question, card: GPU) -> None:
    """The figures: all are the question's but the last two, which are this machine's."""
    with console.status("measuring this machine"):
        name, levels = hierarchy.present()
        machines = [(name, levels)]
        if hierarchy.known(name) is not card:
            machines.insert(0, (card.name, hierarchy.of_gpu(card)))
        measured = breakdown.measure()
    for path in io_figures.write(folder, question, card, machines, measured):
        console.print(f"picture: {path}")


def _write_page(out: Path) -> None:
    """Record all that the page can show, half a minute of it, and write the page."""
    scenarios = page.SCENARIOS
    with Progress(
        TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=len(scenarios))
        size = page.write(out, scenarios, progress=lambda _: bar.advance(task))
    console.print(f"{len(scenarios)} settings, and in each run the bytes that io_model has in closed form")
    console.print(f"page: {out} ({units.size(size)}); open it in a browser", soft_wrap=True)


@app.command()
def check(
    problems: Annotated[int, typer.Option(min=1, help="How many random problems.")] = 60,
    seed: int = 0,
) -> None:
    """Random problems on every backend that is present, against an fp64 reference. Exit status 1 on a fault."""
    findings = []
    with console.status("checking") as status:
        for finding in checking.check(problems, seed):
            findings.append(finding)
            status.update(f"problem {finding.number + 1} of {problems}")
    console.print(tables.errors(findings))
    console.print("error / allowed, the worst: allowed are 3 times the error of plain torch code, and roundings.\n")
    faults = [finding for finding in findings if finding.fault]
    for finding in faults:
        where = f"{finding.backend} on {finding.device}, problem {finding.number} of seed {seed}"
        console.print(f"FAULT  {where}\n       {finding.problem}\n       {finding.fault}", style="red", markup=False)
    console.print(f"{problems} problems, {len(findings)} runs, {len(faults)} faults")
    if faults or not findings:
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """Versions, devices, and which backends work here. Exit status 1 if none does."""
    for title, facts in (("versions", diagnosis.versions()), ("devices", diagnosis.hardware())):
        console.print(tables.facts(title, facts), "")
    found = list(diagnosis.diagnose())
    console.print(tables.diagnoses(found))
    if not any(one.works for one in found):
        raise typer.Exit(1)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def bench(context: typer.Context) -> None:
    """Run the repository's benchmarks (python -m bench); further arguments are passed on."""
    checkout = Path(__file__).parent.parent
    if not (checkout / "bench").is_dir():
        console.print("The benchmarks are not part of the installed package: run `tilewise bench` in a checkout.")
        raise typer.Exit(1)
    done = subprocess.run([sys.executable, "-m", "bench", *context.args], cwd=checkout, check=False)
    raise typer.Exit(done.returncode)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
