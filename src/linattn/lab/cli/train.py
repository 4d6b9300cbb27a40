"""``linattn train``: language models, tasks of sequences."""

import typer

from linattn.lab.cli.train_text import lm, mlm, task

app = typer.Typer(help="Train one model on text, or on a task of sequences.", no_args_is_help=True)
for command in (lm, mlm, task):
    app.command()(command)
