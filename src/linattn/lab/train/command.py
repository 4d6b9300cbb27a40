"""``linattn train images``: one mechanism in a vision transformer or a pyramid."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from linattn.lab.cases import Where
from linattn.lab.experiment import FAILED, RIGHT
from linattn.lab.screen import Screen
from linattn.lab.tasks.load import load_images
from linattn.lab.train.accelerator import create_accelerator
from linattn.lab.train.batches import create_batches
from linattn.lab.train.config import TrainConfig
from linattn.lab.train.energy import check_energy
from linattn.lab.train.host import VisionHost
from linattn.lab.train.loop import train
from linattn.lab.train.mechanism_options import check_owners, option_or, options_of
from linattn.lab.train.rounds import DivergedError
from linattn.mechanisms.registry import list_mechanisms
from linattn.support.checkpoint import ResumeError
from linattn.support.config import option
from linattn.support.options import OptionError, check_folder, options_words


@dataclass(frozen=True, kw_only=True)
class TrainImages(VisionHost, TrainConfig):
    """Train one mechanism on images. Started again with the same options, it goes on where it stopped.

    Exit code: 0 all right, 1 the training diverged, 2 a bad option, 130 interrupted (the same command goes on).
    """

    mechanism: str = option(
        "softmax", "A name from `linattn mechanisms`.", choices=lambda: list_mechanisms(bidirectional=True)
    )
    output: Path | None = option(
        None, "Folder of the run.", affects=False, default_text="runs/train/<data>-<mechanism>-seed<seed>"
    )
    jobs: int = option(1, hidden=True, affects=False)
    where: Where = option("here", hidden=True, affects=False)
    option: dict[str, Any] = option({}, "Option of the mechanism: key=value; may be given again.")

    def check(self) -> None:
        super().check()
        check_owners(self.option, (self.mechanism,))

    def run(self, screen: Screen) -> int:
        folder = self.output or Path("runs/train") / f"{Path(self.data).stem}-{self.mechanism}-seed{self.seed}"
        check_folder("output", folder)
        data, options = load_images(self.data, image_size=self.image_size), options_of(self.mechanism, self.option)
        accelerator = create_accelerator(self)
        try:
            model = self.create(self.mechanism, data, self.seed, options)
        except (ValueError, TypeError) as error:
            name, _, message = str(error).partition(" ")
            if name in {field.name for field in fields(VisionHost)}:  # "patch_size must be ..."
                raise OptionError(name, message) from error
            raise option_or("mechanism", error, self.mechanism, options) from error
        check_energy(self.energy_loss, model.modules())
        rank, processes = accelerator.process_index, accelerator.num_processes
        batches = create_batches(data, self, accelerator.device, rank=rank, processes=processes)
        steps, screen = batches.steps_per_epoch, screen if rank == 0 else Screen(quiet=True)
        try:
            with screen.progress(self.epochs * steps) as bar:
                tested = ""

                def on_step(epoch: int, step: int, loss: float, accuracy: float) -> None:
                    words = f"epoch {epoch + 1}/{self.epochs}  loss {loss:.3f}  train {accuracy:.1f} %{tested}"
                    bar.show(epoch * steps + step, words)

                def on_epoch(record: Any) -> None:
                    nonlocal tested
                    tested = f"  test {record.top1:.1f} %"

                found = train(
                    model, batches, self, folder, options=options, on_step=on_step, on_epoch=on_epoch,
                    accelerator=accelerator,
                )  # fmt: skip
        except ResumeError as error:
            raise OptionError("output", str(error)) from error
        except DivergedError as error:
            screen.warn(str(error))
            return FAILED
        count = sum(parameter.numel() for parameter in model.parameters())
        screen.say(
            f"{self.mechanism} {options_words(options)}".strip()
            + f": {found.top1:.2f} % of the test images after {len(found.epochs)} epochs, {count:,} parameters, "
            f"{found.seconds:.1f} s of training\nweights: {folder / 'weights.pt'}\nlog:     {folder / 'log.jsonl'}"
        )
        if rank == 0:
            screen.result({"top1": found.top1, "seconds": found.seconds, "parameters": count, "folder": str(folder)})
        return RIGHT
