"""A final run that was trained already, while its learning rate was chosen: it is tested and not trained again."""

from json import loads

from linattn.compare.cells import Cell, train_config
from linattn.compare.compare import loads_like
from linattn.compare.text.subject import Texts, validation
from linattn.train.accelerator import create_accelerator, matrix_products
from linattn.train.checkpoint import model_digest
from linattn.train.log import write_log
from linattn.train.text.evaluate import evaluate
from linattn.train.text.feed import Feed
from linattn.train.text.folder import TextFolder
from linattn.train.text.hosts import create_host
from linattn.train.text.loop import task_settings
from linattn.train.text.network import TextNetwork
from linattn.train.text.records import StepRecord, TextResult


def adopt(texts: Texts, cell: Cell) -> bool:
    """Write the result of ``cell`` from the run that chose its learning rate; False where the two are not the same.

    They are where both train on the same sequences from the same weights: what is drawn is only tested on other draws
    while a rate is chosen. That run's weights are then tested on the test data, once, as at the end of a run.
    """
    config, task = train_config(texts.config, cell), texts.task
    source = TextFolder(Cell(cell.mechanism, cell.seed, cell.lr, validation=True).folder(texts.config.output))
    files = TextFolder(cell.folder(texts.config.output), texts.config.keep_weights)
    trained = source.result.exists() and source.weights.exists()
    if cell.validation or config.rounds != 1 or not trained or files.result.exists():
        return False
    trained_on, tested_on = validation(task)
    if task_settings(trained_on) != task_settings(task):
        return False
    model = create_host(texts.hosts[cell.mechanism], task, cell.seed)
    fingerprint = config.fingerprint() | {
        "model": model_digest(model), "task": task_settings(task), "processes": 1, "test": None, "start": None,
    }  # fmt: skip
    found = loads(source.result.read_text())
    if found["fingerprint"] != loads_like(fingerprint | {"test": task_settings(tested_on)}):
        return False
    model.load_state_dict(source.load_weights(), strict=not model.config.tie_word_embeddings)
    accelerator = create_accelerator(config)
    network = TextNetwork(model.to(accelerator.device), task)
    with matrix_products(config.precision):
        metrics = evaluate(network, Feed(task, config, accelerator.device).test(), accelerator)
    record = StepRecord(**found["records"][-1] | {"metrics": metrics, "score": metrics[task.metric]})
    files.path.mkdir(parents=True, exist_ok=True)
    write_log(files.log, [record])
    files.save_result(network, TextResult.of([record], task.metric).as_dict(), fingerprint)
    return True
