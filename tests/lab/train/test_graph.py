"""Training on small graphs whose answer is known, and scores against scikit-learn's."""

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score
from torch import nn

from linattn.lab.tasks.graph.generated import communities, grid
from linattn.lab.train.graph import (
    GraphConfig,
    Nodes,
    NotFiniteError,
    accuracy,
    average_precision,
    binary_f1,
    create_objective,
    create_optimizer,
    roc_auc,
    train_graph,
)
from linattn.models.graph import create_graph_model
from linattn.support.options import OptionError

# Features alone tell little (signal 0.3 in 16 numbers of noise), the 12 neighbours tell the class.
DATA = communities(400, 4, 12, signal=0.3, seed=2)
CONFIG = GraphConfig(epochs=60, lr=0.05, weight_decay=1e-4)


def create(name, objective, **options):
    task = "links" if objective.outputs is None else "nodes"
    return lambda: create_graph_model(
        name, in_channels=objective.data.num_features, hidden=16, out_channels=objective.outputs, task=task, **options
    )


def test_neighbours_give_the_class_away():
    """A node whose features are averaged over two hops is classified; by its own features alone it is not."""
    objective = create_objective(DATA, CONFIG)
    found = train_graph(create("sgc", objective), objective, CONFIG)
    alone = train_graph(create("sgc", objective, hops=0), objective, CONFIG)
    assert found["score"] > 95
    assert alone["score"] < 75
    assert found["records"][0]["train_loss"] > 3 * found["records"][-1]["train_loss"]


def test_of_two_classes_f1_is_told_beside_the_accuracy():
    for classes, wanted in ((2, {"accuracy", "binary_f1"}), (3, {"accuracy"})):
        objective = create_objective(communities(60, classes, 6), CONFIG)
        found = train_graph(create("sgc", objective), objective, replace(CONFIG, epochs=2))
        assert found["scores"].keys() == wanted
        assert found["score"] == found["scores"]["accuracy"]


def test_links_are_found():
    """In a grid nodes next to each other share neighbours, random pairs do not."""
    config = GraphConfig(task="links", epochs=60, lr=0.01, weight_decay=0.0, eval_every=5)
    objective = create_objective(grid(12, 12), config)
    found = train_graph(create("gcn", objective, dropout=0.0), objective, config)
    assert found["score"] > 75
    assert found["scores"].keys() == {"auc", "average_precision"}
    assert [record["round"] for record in found["records"]] == list(range(5, 61, 5))


def test_degrees_as_features_do_not_tell_of_held_out_links():
    """A large graph without features has its degrees for them: counted anew, over the edges of training."""
    data = grid(60, 150)
    assert data.x[:, :5].sum() == data.num_nodes  # one-hot degrees of 2 to 4
    found = create_objective(data, GraphConfig(task="links")).data
    degrees = found.edge_index[0].bincount(minlength=data.num_nodes)
    assert torch.equal(found.x.argmax(1), degrees)
    assert degrees.sum() < data.num_edges
    own = data.x.roll(1, 1)
    other = create_objective(replace(data, x=own), GraphConfig(task="links")).data
    assert torch.equal(other.x, own)  # features of the user stay


class Scripted:
    """Scores that are written down: the model holds its epoch, test data likes another one than validation."""

    metric = "accuracy"
    outputs = None
    val = (50.0, 70.0, 90.0, 90.0, 60.0, 90.0)
    losses = (1.0, 0.9, 0.5, 0.4, 0.1, 0.6)
    test = (10.0, 99.0, 20.0, 30.0, 98.0, 40.0)

    def __init__(self):
        self.asked = []

    def results(self, model, part, draw):
        return (-model.epoch.sum(),)  # with lr 1 and no decay, Adam adds 1 a step

    def evaluate(self, model, part):
        epoch = round(float(model.epoch.detach())) - 1
        self.asked.append((part, epoch))
        return self.losses[epoch], {"accuracy": getattr(self, part)[epoch]}


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.epoch = nn.Parameter(torch.zeros(1))


def test_the_epoch_is_chosen_on_validation_and_tested_once():
    objective, config = Scripted(), GraphConfig(epochs=6, lr=1.0, weight_decay=0.0)
    found = train_graph(Counter, objective, config)
    # Epochs 3, 4 and 6 are equal; 4 has the lowest loss.
    assert (found["epoch"], found["val"], found["score"]) == (4, 90.0, 30.0)
    assert [ask for ask in objective.asked if ask[0] == "test"] == [("test", 3)]
    early = train_graph(Counter, Scripted(), replace(config, patience=1))
    assert (early["epoch"], len(early["records"]), early["score"]) == (4, 5, 30.0)
    objective = Scripted()
    untested = train_graph(Counter, objective, config, test=False)
    assert (untested["score"], "test" in dict(objective.asked)) == (90.0, False)
    objective = create_objective(DATA, CONFIG)
    results = objective.results
    objective.results = lambda model, *given: (torch.inf * results(model, *given)[0], *results(model, *given)[1:])
    with pytest.raises(NotFiniteError, match=r"epoch 1, lr 0\.05;"):
        train_graph(create("sgc", objective), objective, CONFIG)


def test_weights_on_the_disk_are_those_that_were_tested(tmp_path):
    objective = create_objective(DATA, CONFIG)
    found = train_graph(create("gcn", objective), objective, CONFIG, tmp_path)
    again = train_graph(create("gcn", objective), objective, CONFIG)
    assert found | {"seconds": 0} == again | {"seconds": 0}
    model = create("gcn", objective)().eval()
    model.load_state_dict(torch.load(tmp_path / "weights.pt"))
    with torch.no_grad():
        assert objective.evaluate(model, "test")[1]["accuracy"] == found["score"]
        assert objective.evaluate(model, "val")[1]["accuracy"] == found["val"]


def test_each_branch_of_a_model_has_its_weight_decay():
    config = GraphConfig(weight_decay=0.3, attention_weight_decay=0.1)
    for name, decays in (("pseudo_riemannian", {"blocks": 0.1, "last": 0.1, "convolutions": 0.3, "head": 0.3}),
                         ("gcn", {"stack": 0.3, "last": 0.3})):  # fmt: skip
        model = create(name, create_objective(DATA, config))()
        of = {id(p): group["weight_decay"] for group in create_optimizer(model, config).param_groups
              for p in group["params"]}  # fmt: skip
        assert len(of) == len(list(model.parameters()))
        for part, decay in decays.items():
            assert {of[id(p)] for p in getattr(model, part).parameters()} == {decay}, (name, part)


def test_splits_follow_the_seed_and_the_data():
    given = replace(
        DATA, **{f"{part}_mask": torch.arange(400) % 4 == i for i, part in enumerate(("train", "val", "test"))}
    )
    assert torch.equal(create_objective(given, GraphConfig(seed=1)).data.train_mask, given.train_mask)
    first, second = (create_objective(DATA, GraphConfig(seed=seed)) for seed in (0, 1))
    assert isinstance(first, Nodes)
    assert not torch.equal(first.data.train_mask, second.data.train_mask)
    with pytest.raises(OptionError, match="comes without one"):
        create_objective(DATA, GraphConfig(split="given"))
    with pytest.raises(OptionError, match="use --task links"):
        create_objective(grid(3, 3), GraphConfig())


@pytest.mark.parametrize("levels", [3, 10**6])  # many equal scores, and none
def test_scores_are_those_of_scikit_learn(levels):
    draw = torch.Generator().manual_seed(levels)
    labels = torch.randint(2, (500,), generator=draw)
    scores = (torch.rand(500, generator=draw) + 0.3 * labels).mul(levels).round()
    assert float(roc_auc(scores, labels)) == pytest.approx(100 * roc_auc_score(labels, scores), abs=1e-9)
    found = float(average_precision(scores, labels))
    assert found == pytest.approx(100 * average_precision_score(labels, scores), abs=1e-9)


def test_classes_are_counted_as_scikit_learn_counts_them():
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (300,), generator=draw)
    logits = torch.randn(300, 2, generator=draw, dtype=torch.float64)
    logits[:, 1] += labels - 0.3
    assert float(binary_f1(logits, labels)) == pytest.approx(100 * f1_score(labels, logits.argmax(1)), abs=1e-9)
    assert binary_f1(torch.tensor([[1.0, 0.0]]), torch.tensor([0])) == 0
    assert accuracy(torch.eye(4), torch.tensor([0, 1, 2, 0])) == 75
