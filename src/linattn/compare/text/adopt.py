"""A final run that was trained already, while its learning rate was chosen: it is copied and not trained again."""

from dataclasses import replace
from shutil import copyfile
from typing import TYPE_CHECKING

from linattn.compare.cells import Cell, train_config
from linattn.support.files import write_atomically
from linattn.train.checkpoint import ResumeError
from linattn.train.text.folder import TextFolder
from linattn.train.text.hosts import create_host
from linattn.train.text.loop import text_fingerprint

if TYPE_CHECKING:
    from linattn.compare.text.subject import Texts

OWN_TEST = "own-test"  # folder in that of a run that tries a rate: its evaluations on test data


def adopt(texts: "Texts", cell: Cell) -> bool:
    """Finish the folder of ``cell`` with what the run that tried its learning rate has kept; False: nothing fits.

    It fits where both train on the same sequences from the same weights. Weights are those of that run: of rates that
    are not chosen there is no second copy.
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
    except ResumeError:  # of another model, after an update: what fits no longer is trained again
        return False
    files.remove_halves()
    if files.keep_weights:
        files.copy_weights(tried)
    write_atomically(files.log, lambda temporary: copyfile(own.log, temporary))
    write_atomically(files.result, lambda temporary: copyfile(own.result, temporary))  # last, as it is what counts
    files.checkpoint.unlink(missing_ok=True)
    return True
