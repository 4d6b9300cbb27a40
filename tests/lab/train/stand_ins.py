"""Recorders in the place of CUDA's: one that keeps the function, one that refuses and some that get it wrong."""

import torch

from linattn.lab.train import captured_step, rounds
from linattn.lab.train.captured_step import RecordError


class Keeps:
    """A graph is the function itself."""

    def __init__(self, device):
        self.recorded, self.replays = 0, 0

    def warm_up(self, run):
        run()

    def forget(self):
        pass

    tidy = forget

    def record(self, run):
        self.recorded += 1

        def replay():
            self.replays += 1
            run()

        return replay


class Refuses(Keeps):
    def record(self, run):
        raise RecordError("AcceleratorError: operation not permitted when stream is capturing")


def recorded_with(recorder, patch):
    """All runs from here on record their steps; a list of the recorders that were made."""
    made = []
    patch.setattr(rounds, "graphs_wanted", lambda config, accelerator: config.graphs is not False)
    patch.setattr(captured_step, "Recorder", lambda device: made.append(recorder(device)) or made[-1])
    return made


def wrong_replay(kind, trained):
    """A recorder whose replays are wrong in one way; ``trained`` gets the run."""

    class Wrong(Keeps):
        def record(self, run):
            current = trained[-1]
            rate, first = current._rate.clone(), torch.get_rng_state()

            def replay():
                if kind == "nothing":
                    return
                if kind == "frozen rate":
                    current._rate.copy_(rate)
                elif kind == "frozen draws":
                    torch.set_rng_state(first)
                averages = [value.clone() for value in current.averages]
                run()
                if kind == "no average":
                    for value, old in zip(current.averages, averages, strict=True):
                        value.copy_(old)
                elif kind == "no sums":
                    current.sums.zero_()

            return replay

    return Wrong
