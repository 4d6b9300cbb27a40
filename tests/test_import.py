"""``import linattn`` needs torch alone, and is quick."""

import json
import subprocess
import sys

OPTIONAL = ("triton", "transformers", "timm", "matplotlib", "cyclopts", "rich")
BUDGET_SECONDS = 0.3  # of CPU time beyond the import of torch: what every start costs

# torch may import some of these itself: they are blocked once it is there, and only what comes after it counts.
SCRIPT = """
import json
import sys
import time

import torch

OPTIONAL = {optional!r}
had = set(sys.modules)


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)


sys.meta_path.insert(0, Blocked())
begin = time.process_time()
{statement}
seconds = time.process_time() - begin
{work}
new = {{name.split(".")[0] for name in set(sys.modules) - had}}
print(json.dumps({{"seconds": seconds, "new": sorted(new)}}))
"""

INPUTS = "q, k, v = torch.ones(3, 1, 2, 5, 4).unbind()"
WORK = f"""
{INPUTS}
assert linattn.linear_attention(q, k, v, causal=True).shape == v.shape
mechanism = linattn.create_mechanism("elu", num_heads=2, head_dim=4)
assert mechanism(q, k, v).isfinite().all()
assert linattn.list_mechanisms()
"""
IMPORT_THEM_ALL = """
for name in set(OPTIONAL) - had:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        assert "blocked" in str(error), error
    else:
        raise AssertionError(f"{name} was imported")
"""


def in_fresh_process(statement: str, work: str = "") -> dict:
    script = SCRIPT.format(optional=OPTIONAL, statement=statement, work=work)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_works_without_optional_packages_and_brings_none():
    torch_alone = in_fresh_process("", f"{INPUTS}\ntorch.nn.functional.scaled_dot_product_attention(q, k, v)")
    with_linattn = in_fresh_process("import linattn", WORK)
    assert "linattn" in with_linattn["new"]
    assert not (set(with_linattn["new"]) - set(torch_alone["new"])) & set(OPTIONAL)


def test_the_block_blocks():
    """A test of the test: none that torch had not imported can be imported any more."""
    in_fresh_process("", IMPORT_THEM_ALL)


def test_is_quick():
    """The best of three processes: a busy machine slows each of them down, and none speeds one up."""
    best = min(in_fresh_process("import linattn")["seconds"] for _ in range(3))
    assert best < BUDGET_SECONDS, (
        f"import linattn takes {best:.2f} s beyond torch, allowed {BUDGET_SECONDS} s; "
        "python -X importtime -c 'import torch, linattn' shows where it goes"
    )
