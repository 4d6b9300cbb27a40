"""A race of models on the screen: progress, a table, files, and an exit code."""

import json
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from linattn.lab.bench.models.cases import SOFTMAX, backbone_case
from linattn.lab.bench.models.chart import draw_sweep
from linattn.lab.bench.models.rows import BAD, ModelRow, ModelsResult
from linattn.lab.bench.models.run import plan_of, run_models
from linattn.lab.bench.models.settings import ModelsConfig
from linattn.lab.bench.models.start import run_apart
from linattn.lab.bench.progress import row_progress
from linattn.lab.bench.screen import INTERRUPTED, RIGHT, WRONG
from linattn.support.extras import MissingExtraError
from linattn.support.files import write_json
from linattn.support.options import OptionError

COLORS = {"WRONG": "bold red", "not on kernels": "bold red", "failed": "bold red", "absent": "dim", "left out": "dim",
          "out of memory": "yellow"}  # fmt: skip


def measure_models(
    config: ModelsConfig, path: Path, *, resume: bool = False, command: list[str] | None = None
) -> ModelsResult:
    """Run with a progress bar on stderr, so that printed results can be piped; every finished row is on disk."""
    config.check()
    result = ModelsResult(config.describe(command))
    if resume and path.exists():
        take_up(result, path)
    runs = result.meta.setdefault("runs", [])
    runs.append({"date": result.meta["date"], "command": result.meta["command"]})
    with row_progress() as progress:
        task = progress.add_task("starting", total=len(plan_of(config, result)))

        def save() -> None:
            write_json(path, result.as_json())

        def on_row(row: ModelRow) -> None:
            save()
            progress.advance(task)

        def on_work(what: str) -> None:
            progress.update(task, description=what)

        if config.torch_device.type == "cuda":
            run_apart(config, result, on_row=on_row, on_work=on_work, on_checked=save)
        else:
            run_models(config, result, on_row=on_row, on_work=on_work)
    if result.rows or result.checked:
        save()  # once more: only now is it known whether the run was interrupted
    return result


def take_up(result: ModelsResult, path: Path) -> None:
    """Take over the rows of an earlier run with the same settings on the same machine.

    Rows that it checked but did not measure are kept if the code is the same, as a row belongs to one version of it.
    """
    earlier = ModelsResult.from_json(json.loads(path.read_text()))
    same = [earlier.meta["settings"][key] == result.meta["settings"][key] for key in ("quick", "seed", "backend")]
    if not all(same) or any(earlier.meta[key] != result.meta[key] for key in ("device", "versions")):
        raise OptionError("resume", f"{path} is of another device, other versions or other settings")
    result.rows, result.meta["runs"] = earlier.rows, earlier.meta["runs"]
    if earlier.meta.get("source") == result.meta["source"]:
        result.checked = earlier.checked


def models(config: ModelsConfig, path: Path, console: Console, *, resume: bool = False) -> int:
    """Measure and show; returns the exit code: 1 if a row is wrong, failed or not on kernels, 130 after Ctrl-C."""
    result = measure_models(config, path, resume=resume)
    console.print(models_table(result))
    for line in kernel_lines(result):
        console.print(line, soft_wrap=True, highlight=False)
    goals = result.goals()
    if goals:
        beaten, measured = sum(g.reached is True for g in goals), sum(g.reached is not None for g in goals)
        console.print(f"faster than softmax: {beaten} of {measured} measured ones")
    if result.rows:
        console.print(f"results: {path}", soft_wrap=True)
    chart = path.with_suffix(".png")
    if any(backbone_case(row.case) for row in result.rows) and _draw(result, chart, console):
        console.print(f"chart: {chart}", soft_wrap=True)
    if result.interrupted:
        console.print("[yellow]interrupted: the rows above are complete, --resume measures the rest[/]")
    elif any(row.status == "left out" for row in result.rows):
        console.print("[yellow]some were left out for want of time: --resume measures them[/]")
    if not result.right:
        bad = [f"{row.mechanism} in {row.case}, {row.mode}" for row in result.rows if row.status in BAD]
        console.print(f"[bold red]wrong, failed or not on kernels: {', '.join(bad)}[/]")
    return INTERRUPTED if result.interrupted else RIGHT if result.right else WRONG


def _draw(result: ModelsResult, chart: Path, console: Console) -> bool:
    try:
        return draw_sweep(result, chart)
    except MissingExtraError as error:  # the results are on disk: a chart can be drawn later
        console.print(f"[yellow]no chart: {escape(str(error))}[/]")
        return False


def models_table(result: ModelsResult) -> Table:
    """Columns ``of softmax``: time over the same model with flash softmax; ``map``: where features are computed."""
    title = f"{result.meta['device']}, {result.meta['precision']}, forward and backward"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("model / mechanism", "mode", "ms", "of softmax", "per second", "peak GiB", "budget", "map", ""):
        left = header in ("model / mechanism", "mode", "map", "")
        table.add_column(header, justify="left" if left else "right", no_wrap=header != "")
    for case in dict.fromkeys(row.case for row in result.rows):
        own = [row for row in result.rows if row.case == case]
        table.add_row(f"[bold]{case}[/]", "", "", "", "", "", "", "", f"[dim]{own[0].shape}[/]")
        for row in own:
            table.add_row(*_cells(row, result), end_section=row is own[-1])
    return table


def _cells(row: ModelRow, result: ModelsResult) -> list[str]:
    remark = f"[dim]measured as {row.same_as}[/]" if row.same_as else ""
    if row.status != "ok":
        remark = f"[{COLORS[row.status]}]{row.status}: {escape(row.reason)}[/]"
    used = "" if row.error is None or not row.budget else f"{row.error / row.budget:.0%}"
    names = [f"  {row.mechanism}", row.mode]
    if row.median_ms is None or row.per_second is None:
        return [*names, "", "", "", "", used, row.feature_map, remark]
    share = result.over_softmax(row)
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"
    over = "" if share is None or row.mechanism == SOFTMAX else f"{share:.2f}x"
    return [
        *names, f"{row.median_ms:.4g}", over, f"{row.per_second:,.0f} {row.unit}", peak, used, row.feature_map, remark,
    ]  # fmt: skip


def kernel_lines(result: ModelsResult) -> list[str]:
    """One line per profile: where its time went, which form attention takes, what runs outside of kernels."""
    lines = []
    for row in result.rows:
        if row.profile is None:
            continue
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in row.profile["shares"].items() if share >= 0.005)
        calls = "; ".join(f"{count} x {escape(text)}" for text, count in row.explain.items())
        beside = ", ".join(f"{name} {count}x" for name, count in row.beside.items())
        eager = ", ".join(f"{escape(name)} {count}x" for name, count in row.profile["eager_elementwise"].items())
        lines.append(f"[bold]{row.case}, {row.mechanism}[/]: {shares}")
        part = f", {row.explain_of}" if row.explain_of else ""
        lines.append(f"  attention{part}: {calls or 'no call was heard'}")
        lines += [f"  beside its kernels{part}: {beside}"] if beside else []
        lines += [f"  eager elementwise kernels: {eager}"] if eager else []
    return lines
