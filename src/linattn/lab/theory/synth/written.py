"""Checks what trained models write: sentences of Lano, answers of Brevo."""

from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from linattn.lab.compare.cells import Cell
from linattn.lab.compare.text.settings import TextCompareConfig
from linattn.lab.compare.text.subject import Texts
from linattn.lab.tasks.synthetic.brevo import Brevo
from linattn.lab.tasks.synthetic.brevo_answers import right_answer
from linattn.lab.tasks.synthetic.lano import Lano
from linattn.lab.train.text.folder import TextFolder
from linattn.lab.train.text.hosts import create_host
from linattn.support.options import OptionError

PAD = 1  # before shorter prompts and after finished texts: masked or cut off, so any token except the end will do


def write_samples(part: TextCompareConfig, results: dict[str, Any], samples: int, console: Console) -> None:
    """Add ``written`` to every entry of ``results``: the percentage of right texts among those its seed 0 writes."""
    texts = Texts(part)
    for entry in results["mechanisms"]:
        rows = [r for r in results["rows"] if r["mechanism"] == entry["mechanism"] and r["seed"] == 0]
        if not rows or rows[0]["status"] != "done":
            continue
        cell = Cell(entry["mechanism"], 0, rows[0]["lr"])
        entry["written"] = share_right(load(texts, cell), texts.task, samples)
        console.print(f"{entry['mechanism']}: {entry['written']:.1f} % of {samples} written are right", soft_wrap=True)


def load(texts: Texts, cell: Cell) -> Any:
    """Load the model of a finished run."""
    model = create_host(texts.hosts[cell.mechanism], texts.task, cell.seed)
    model.load_state_dict(TextFolder(cell.folder(texts.config.output)).load_weights())
    return model.to(texts.config.train.device).eval()


@torch.no_grad()
def share_right(model: Any, task: Any, samples: int) -> float:
    """Percentage of right texts: sentences at temperature 1 from ``bos`` for Lano, greedy answers for Brevo."""
    if isinstance(task, Lano):
        prompts = torch.zeros(samples, 1, dtype=torch.int64)
        written = _written(model, prompts, torch.ones_like(prompts), task.length, stop=0, sample=True)
        return 100 * sum(task.valid(row) for row in written) / samples
    if isinstance(task, Brevo):
        questions = task.questions(samples)
        size = max(map(len, questions))
        prompts = torch.tensor([[PAD] * (size - len(row)) + row for row in questions])
        mask = torch.tensor([[0] * (size - len(row)) + [1] * len(row) for row in questions])
        most = task.nodes * task.words.longest + 1
        written = _written(model, prompts, mask, most, stop=task.bos + 3, sample=False)
        pairs = zip(questions, written, strict=True)
        return 100 * sum(right_answer(asked, found, task.words, task.bos) for asked, found in pairs) / samples
    raise OptionError("samples", f"are checked for lano and brevo, not for {task.name}")


def _written(model: Any, prompts: Tensor, mask: Tensor, most: int, *, stop: int, sample: bool) -> list[list[int]]:
    """What the model writes after each prompt, up to the token that stops it; empty if it does not stop."""
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(0)
        out = model.generate(
            prompts.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=most, do_sample=sample,
            eos_token_id=stop, pad_token_id=PAD,
            **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} if sample else {}),
        )  # fmt: skip
    rows = out[:, prompts.shape[1] :].tolist()
    return [row[: row.index(stop)] if stop in row else [] for row in rows]
