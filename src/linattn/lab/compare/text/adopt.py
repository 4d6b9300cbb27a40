"""Adopts final runs that were already trained to choose a learning rate: they are copied, not trained again."""

from dataclasses import replace
from shutil import copyfile
from typing import TYPE_CHECKING

from linattn.lab.compare.cells import Cell, train_config
from linattn.lab.train.text.folder import TextFolder
from linattn.lab.train.text.hosts import create_host
from linattn.lab.train.text.loop import text_fingerprint
from linattn.support.checkpoint import ResumeError
from linattn.support.files import write_atomically

if TYPE_CHECKING:
    from linattn.lab.compare.text.subject import Texts

OWN_TEST = "own-test"  # folder, inside that of a run that tries a rate, for its evaluations on test data


def adopt(texts: "Texts", cell: Cell) -> bool:
    """Finish the folder of ``cell`` with the files of the run that tried its learning rate; False if they do not fit.

    They fit if both runs train on the same sequences from the same weights. Weights are copied from that run, so that
    they are stored twice only for rates that are chosen.
    """
    tried = TextFolder(replace(cell, validation=True).folder(texts.config.output))
    own = TextFolder(tried.path / OWN_TEST, keep_weights=False)
    files = TextFolder(cell.folder(texts.config.output), texts.config.keep_weights)
    finished = tried.result.exists() and own.result.exists()
    if cell.validation or not finished or (files.keep_weights and not tried.weights.exists()):
        return False
    model = create_host(texts.hosts[cell.mechanism], texts.task, cell.seed)
    try:
        fingerprint = text_fingerprint(model, texts.task, train_config(texts.config, cell))
        own.load_result(fingerprint)
        if files.load_result(fingerprint) is not None:
            return True
    except ResumeError:  # of a different model, after an update: such runs are trained again
        return False
    files.remove_halves()
    if files.keep_weights:
        files.copy_weights(tried)
    write_atomically(files.log, lambda temporary: copyfile(own.log, temporary))
    write_atomically(files.result, lambda temporary: copyfile(own.result, temporary))  # last: it marks the run finished
    files.checkpoint.unlink(missing_ok=True)
    return True
